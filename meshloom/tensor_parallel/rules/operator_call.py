"""An operator's call as rules see it: arguments by name, tensors by shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshloom.program.ir.callables import out_of_place
from meshloom.program.ir.nodes import Meta, Node, Ref
from meshloom.tensor_parallel.rules.factors import Dims, Factors


@dataclass(frozen=True, kw_only=True)
class TensorArgument:
    """A tensor argument. number: its index in `Node.operands()`."""

    number: int
    meta: Meta

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its dims."""
        return self.meta.shape


@dataclass(frozen=True, kw_only=True)
class Call:
    """An operator's call.

    name: without namespace and overload.
    arguments: by the schema's names, with defaults filled in; tensors are `TensorArgument`s.
    operands: the tensors, in the order of `Node.operands()`. outputs: the result tensors.
    """

    name: str
    node: Node
    arguments: Mapping[str, Any]
    operands: tuple[TensorArgument, ...]
    outputs: tuple[Meta, ...]

    def dim(self, name: str, ndim: int) -> int:
        """The argument `name`, a dim, counted from the front."""
        return self.arguments[name] % ndim if ndim else 0

    def dims(self, name: str, ndim: int) -> tuple[int, ...]:
        """The argument `name`, one dim or a list of dims; nothing means all of them."""
        given = self.arguments.get(name)
        if given in (None, ()):
            return tuple(range(ndim))
        dims = given if isinstance(given, tuple) else (given,)
        return tuple(each % ndim for each in dims) if ndim else ()


Rule = Callable[[Call], Factors | None]
"""The factor map of a call; None: this call cannot be sharded."""


def call_of(node: Node, metas: Mapping[str, tuple[Meta, ...]]) -> Call | None:
    """The call of a node. None: its target is no operator with a schema, or an operand is a list of
    tensors."""
    # `out_of_place` has the wrapped operator as its first argument.
    inner = node.args[0] if node.target is out_of_place else node.target
    schema = getattr(inner, "_schema", None)
    if schema is None or any(len(metas[ref.name]) != 1 for ref in node.operands()):
        return None
    operands: list[TensorArgument] = []

    def replace(value: Any) -> Any:
        if isinstance(value, Ref):
            operands.append(TensorArgument(number=len(operands), meta=metas[value.name][0]))
            return operands[-1]
        return tuple(map(replace, value)) if isinstance(value, tuple) else value

    args, kwargs = replace(node.args), {key: replace(value) for key, value in node.kwargs.items()}
    arguments = {each.name: each.default_value for each in schema.arguments if each.has_default_value()}
    arguments |= given_by_name(inner, args[1:] if node.target is out_of_place else args, kwargs)
    return Call(
        name=schema.name.removeprefix("aten::"),
        node=node,
        arguments={
            name: tuple(value) if isinstance(value, list) else value for name, value in arguments.items()
        },
        operands=tuple(operands),
        outputs=node.outputs,
    )


def tensor_arguments(call: Call) -> Iterator[tuple[int, ...] | None]:
    """The shape of every tensor argument in the schema's order; None where it is not given. Lists of tensors
    are not supported."""
    schema: Any = call.node.target._schema
    for argument in schema.arguments:
        if "Tensor" in str(argument.type):
            value = call.arguments.get(argument.name)
            yield value.shape if isinstance(value, TensorArgument) else None


def given_by_name(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a call passes explicitly, by name."""
    return dict(zip((argument.name for argument in target._schema.arguments), args, strict=False)) | kwargs


def set_argument(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, value: Any) -> Any:
    """(target, args, kwargs) with argument `name` of the operator's schema set to `value`."""
    names = [argument.name for argument in target._schema.arguments]
    place = names.index(name)
    if place < len(args):
        return target, (*args[:place], value, *args[place + 1 :]), kwargs
    return target, args, {**kwargs, name: value}


def to_output_shape(name: str) -> Any:
    """A `LocalCall` that sets argument `name` to the shape of the local result."""
    return lambda target, args, kwargs, shard: set_argument(
        target, args, kwargs, name, tuple(shard.outputs[0])
    )


def replicated(operands: Sequence[TensorArgument]) -> tuple[Dims, ...]:
    """The dims of operands that every rank needs in full."""
    return tuple((None,) * len(each.shape) for each in operands)
