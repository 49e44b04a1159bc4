"""Facts from an operator's schema: what it writes, and its out-of-place variant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    wanted = _arguments(target)
    return overload if _arguments(overload)[: len(wanted)] == wanted else None


def functional_of_out(node: fx.Node) -> Any:
    """The operator that returns what `node` writes to its `out`."""
    target: Any = node.target
    wanted = [each for each in _arguments(target) if each[0] != "out"]
    packet = target.overloadpacket
    overloads = (getattr(packet, name) for name in packet.overloads())
    return next((each for each in overloads if _arguments(each) == wanted), None)


def _arguments(target: Any) -> list[tuple[str, str]]:
    """Names and types."""
    return [(each.name, str(each.type)) for each in target._schema.arguments]


def running_statistics(node: fx.Node) -> Iterator[fx.Node]:
    """Buffers that batch norm or instance norm updates while it runs, which the schema does not say."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return
    given = {argument.name: value for argument, value in arguments_of(node.target, node.args, node.kwargs)}
    if given.get("training") or given.get("use_input_stats"):
        for name in ("running_mean", "running_var"):
            if isinstance(given.get(name), fx.Node):
                yield given[name]


def arguments_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """The arguments that are passed to an operator: (schema's argument, value)."""
    arguments = target._schema.arguments
    by_name = [(each, kwargs[each.name]) for each in arguments if each.name in kwargs]
    return [*zip(arguments, args, strict=False), *by_name]


def is_written(argument: Any) -> bool:
    """Whether an operator writes to this argument of its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write


def name_of(node: fx.Node) -> str:
    """An operator's name without its overload: `add_`."""
    target: Any = node.target
    if hasattr(target, "_schema"):
        return target._schema.name.removeprefix("aten::")
    return getattr(target, "__name__", str(target))


def is_list(node: fx.Node) -> bool:
    """Whether a node returns several tensors, like split."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and len(schema.returns) == 1 and "List" in str(schema.returns[0].type)


def is_part(node: fx.Node) -> bool:
    """Whether a node is a view of a part, to which writes are scattered back."""
    return name_of(node) in ("slice", "select", "narrow", "diagonal") if node.op == "call_function" else False
