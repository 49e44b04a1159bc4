"""Facts from an operator's schema: what it writes, and its out-of-place variant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def functional(node: fx.Node) -> Any:
    """The out-of-place operator with the same arguments, if torch has one."""
    target: Any = node.target
    name = name_of(node).removesuffix("_")
    packet = getattr(aten, {"normal": "normal_functional"}.get(name, name), None)
    overload = getattr(packet, target._overloadname, None) if packet is not None else None
    if overload is None or name == "copy":  # `copy` has no derivative
        return None
    wanted = [(each.name, str(each.type)) for each in target._schema.arguments]
    return (
        overload
        if [(each.name, str(each.type)) for each in overload._schema.arguments][: len(wanted)] == wanted
        else None
    )


def functional_of_out(node: fx.Node) -> Any:
    """The operator that returns what `node` writes to its `out`."""
    target: Any = node.target
    wanted = [(each.name, str(each.type)) for each in target._schema.arguments if each.name != "out"]
    packet = target.overloadpacket
    overloads = [getattr(packet, name) for name in packet.overloads()]
    return next(
        (
            each
            for each in overloads
            if [(one.name, str(one.type)) for one in each._schema.arguments] == wanted
        ),
        None,
    )


def running_statistics(node: fx.Node) -> Iterator[fx.Node]:
    """Buffers that batch norm or instance norm updates while it runs, which the schema does not say."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return
    given = {argument.name: value for argument, value in arguments_of(node)}
    if given.get("training") or given.get("use_input_stats"):
        for name in ("running_mean", "running_var"):
            if isinstance(given.get(name), fx.Node):
                yield given[name]


def arguments_of(node: fx.Node) -> list[tuple[Any, Any]]:
    """The arguments of a node: (schema's argument, value)."""
    target: Any = node.target
    by_place = list(zip(target._schema.arguments, node.args, strict=False))
    return by_place + [
        (argument, node.kwargs[argument.name])
        for argument in target._schema.arguments
        if argument.name in node.kwargs
    ]


def name_of(node: fx.Node) -> str:
    """An operator's name without its overload: `add_`."""
    target: Any = node.target
    return (
        target._schema.name.removeprefix("aten::")
        if hasattr(target, "_schema")
        else getattr(target, "__name__", str(target))
    )


def is_list(node: fx.Node) -> bool:
    """Whether a node returns several tensors, like split."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and len(schema.returns) == 1 and "List" in str(schema.returns[0].type)


def is_part(node: fx.Node) -> bool:
    """Whether a node is a view of a part, to which writes are scattered back."""
    return name_of(node) in ("slice", "select", "narrow", "diagonal") if node.op == "call_function" else False
