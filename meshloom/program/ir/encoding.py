"""Parts of nodes as JSON, and back: operands, operators, contexts, source lines.

Plain values are themselves and tuples are lists; everything else is an object of one key, its kind.

    linear(x, [3, 2.5], dtype=torch.float32)
    "aten::linear", [{"ref": "x"}, [3, 2.5]], {"dtype": {"dtype": "float32"}}
"""

from __future__ import annotations

import math
import operator
from typing import Any, TypeVar

import torch
from torch.utils._pytree import TreeSpec, treespec_dumps, treespec_loads

from meshloom.core.errors import CaptureError
from meshloom.program.ir.callables import out_of_place
from meshloom.program.ir.contexts import Autocast, Context
from meshloom.program.ir.lines import WAY_OUT, SourceLine, describe_line
from meshloom.program.ir.nodes import Input, Meta, Node, Ref, Variable

T = TypeVar("T", Variable, Input)
_torch: Any = torch
_OURS = {"out_of_place": out_of_place}
_ON_NUMBERS = {"operator": operator, "math": math, "torch": torch}  # functions of numbers read from tensors


def encoded(value: Any) -> Any:
    """JSON of an argument. Raises `CaptureError` for types that have none."""
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, tuple):
        return [encoded(each) for each in value]
    if isinstance(value, Ref):
        return {"ref": value.name}
    if isinstance(value, float):
        return {"float": repr(float(value))}
    if isinstance(value, complex):
        return {"complex": [encoded(value.real), encoded(value.imag)]}
    for kind in _KINDS:
        if isinstance(value, getattr(torch, kind)):
            return {kind: str(value).removeprefix("torch.")}
    if callable(value):
        return {"operator": encoded_operator(value)}
    raise CaptureError(
        f"The program holds a {type(value).__name__}, which cannot be sent to another rank. {WAY_OUT}"
    )


_KINDS = ("dtype", "device", "layout", "memory_format")


def decoded(value: Any) -> Any:
    """The argument encoded as `value`."""
    if isinstance(value, list):
        return tuple(decoded(each) for each in value)
    if not isinstance(value, dict):
        return value
    ((kind, text),) = value.items()
    if kind == "ref":
        return Ref(text)
    if kind == "float":
        return float(text)
    if kind == "complex":
        return complex(*map(decoded, text))
    if kind == "device":
        return torch.device(text)
    if kind in _KINDS:
        constant = getattr(torch, text)
        assert isinstance(constant, getattr(torch, kind))
        return constant
    return decoded_operator(text)


def encoded_operator(target: Any) -> str:
    """Name and overload: `aten::add.Tensor`, `operator.getitem`."""
    if isinstance(target, _torch._ops.OpOverload):
        return target._schema.name + "." + target._overloadname
    for name, function in _OURS.items():
        if function is target:
            return name
    for name, module in _ON_NUMBERS.items():
        if getattr(module, getattr(target, "__name__", ""), None) is target:
            return f"{name}.{target.__name__}"
    raise CaptureError(
        f"The program calls {target}, which has no name by which it can be sent to another rank. {WAY_OUT}"
    )


def decoded_operator(text: str) -> Any:
    """The operator of that name. Raises `CaptureError` if it is not registered here."""
    if text in _OURS:
        return _OURS[text]
    namespace, _, name = text.partition("::")
    if not name:
        module, _, name = text.partition(".")
        if module == "torch" and not name.startswith("sym_"):
            raise ValueError(text)
        return getattr(_ON_NUMBERS[module], name)
    packet, _, overload = name.rpartition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except (AttributeError, RuntimeError) as error:
        raise CaptureError(
            f"The program calls {text.removesuffix('.default')}, which is not registered here (torch {torch.__version__}). "
            "Import what registers it (torch.library) in the job file, so that every rank does, and use one version of torch."
        ) from error


def encoded_node(node: Node, contexts: dict[Context, int], lines: dict[SourceLine, int]) -> dict[str, Any]:
    """JSON of a node, with numbers for its context and line; new ones are added."""
    try:
        args, kwargs = encoded(node.args), {key: encoded(each) for key, each in node.kwargs.items()}
        target = encoded_operator(node.target)
    except CaptureError as error:
        raise CaptureError(f"{node.operator} at {describe_line(node.line)}: {error}") from error
    return {
        "name": node.name,
        "target": target,
        "args": args,
        "kwargs": kwargs,
        "context": contexts.setdefault(node.context, len(contexts)),
        "path": node.path,
        "line": lines.setdefault(node.line, len(lines)) if node.line else None,
        "draw": node.draw,
        "num_draws": node.num_draws,
        "outputs": [encoded_meta(each) for each in node.outputs],
    }


def decoded_node(value: dict[str, Any], contexts: list[Context], lines: list[SourceLine]) -> Node:
    return Node(
        name=value["name"],
        target=decoded_operator(value["target"]),
        args=decoded(value["args"]),
        kwargs={key: decoded(each) for key, each in value["kwargs"].items()},
        context=contexts[value["context"]],
        path=value["path"],
        line=lines[value["line"]] if value["line"] is not None else None,
        draw=value["draw"],
        num_draws=value["num_draws"],
        outputs=tuple(map(decoded_meta, value["outputs"])),
    )


def encoded_meta(meta: Meta) -> list[Any]:
    return [list(meta.shape), str(meta.dtype).removeprefix("torch."), list(meta.stride), meta.requires_grad]


def decoded_meta(value: list[Any]) -> Meta:
    shape, dtype, stride, graded = value
    dtype = decoded({"dtype": dtype})
    return Meta(shape=tuple(shape), dtype=dtype, stride=tuple(stride), requires_grad=graded)


def encoded_context(context: Context) -> dict[str, Any]:
    regions = [{**vars(region), **encoded(region.dtype)} for region in context.autocast]
    return {"autocast": regions, "grad": context.grad}


def decoded_context(value: dict[str, Any]) -> Context:
    regions = (
        Autocast(**{**region, "dtype": decoded({"dtype": region["dtype"]})}) for region in value["autocast"]
    )
    return Context(autocast=tuple(regions), grad=value["grad"])


def encoded_structure(spec: TreeSpec) -> str | None:
    """A structure as text that decodes to an equal one; None if there is no such text."""
    try:
        text = treespec_dumps(spec)
        return text if treespec_loads(text) == spec else None
    except (
        NotImplementedError,
        KeyError,
        TypeError,
        ValueError,
    ):  # a type registered without a name, or keys that are not texts
        return None


def encoded_tensor(tensor: Variable | Input) -> dict[str, Any]:
    """JSON of a parameter, a buffer or an input."""
    return {**vars(tensor), "meta": encoded_meta(tensor.meta)}


def decoded_tensor(kind: type[T], value: dict[str, Any]) -> T:
    """The `Variable` or `Input` encoded as `value`."""
    fields: dict[str, Any] = {**value, "meta": decoded_meta(value["meta"])}
    if "aliases" in fields:
        fields["aliases"] = tuple(fields["aliases"])
    return kind(**fields)
