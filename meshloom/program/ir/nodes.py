"""Nodes of a program, and the named values between them."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from meshloom.program.ir.contexts import Context
from meshloom.program.ir.lines import SourceLine


@dataclass(frozen=True)
class Ref:
    """An operand: the value with this name."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True)
class Meta:
    """A tensor's shape, dtype, strides in elements, and whether it requires grad."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        """Of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True, kw_only=True)
class Node:
    """One operator.

    target: an `OpOverload`, `operator.getitem`, or `out_of_place` of its first argument, an in-place
        operator.
    args, kwargs: `Ref`s, tuples (also for lists) and constants.
    context: the autocast regions and grad mode around it.
    path: the module whose forward it is in; '' is the model itself or the loss function.
    line: the user's line.
    draw, num_draws: number of its first random operation within the chunk, in eager order, and their count.
    outputs: metadata of its result tensors; none for a number.
    """

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    context: Context
    path: str
    line: SourceLine | None
    draw: int | None
    num_draws: int
    outputs: tuple[Meta, ...]

    def with_operands(self, names: Mapping[str, str], **changes: Any) -> Node:
        """The node with renamed operands, and `changes` of its fields."""
        kwargs = {key: renamed(each, names) for key, each in self.kwargs.items()}
        return replace(self, args=renamed(self.args, names), kwargs=kwargs, **changes)

    @property
    def operator(self) -> str:
        """The operator's short name: `linear`, `add.Tensor`."""
        return operator_name(self.target)

    def operands(self) -> Iterator[Ref]:
        """The values it uses, in the order of its arguments."""
        return iter(self._operands)

    @cached_property
    def _operands(self) -> tuple[Ref, ...]:
        return tuple(refs_in((self.args, tuple(self.kwargs.values()))))


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A parameter or buffer. name: the first one in the user's module. aliases: its other names there."""

    value: str  # name of the value in the program
    name: str
    meta: Meta
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Input:
    """A tensor of the batch; name: its path in the batch, like `tokens.0`."""

    value: str
    name: str
    meta: Meta


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a row-major tensor; empty dims count like any others.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def lists_in(nodes: Sequence[Node]) -> frozenset[str]:
    """Values that are not single tensors: lists, from which `getitem` nodes pick, and numbers."""
    picked = {ref.name for node in nodes if node.target is operator.getitem for ref in node.operands()}
    return frozenset(picked | {node.name for node in nodes if len(node.outputs) != 1})


def refs_in(value: Any) -> Iterator[Ref]:
    """Every `Ref` in nested arguments."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from refs_in(each)


def users_by_value(nodes: Iterable[Node]) -> dict[str, list[Node]]:
    """Value -> the nodes with it as an operand, in order."""
    users: dict[str, list[Node]] = {}
    for node in nodes:
        for ref in dict.fromkeys(node.operands()):
            users.setdefault(ref.name, []).append(node)
    return users


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """Nested arguments whose references to values in `names` have the new names."""
    if isinstance(value, Ref):
        return Ref(names.get(value.name, value.name))
    return tuple(renamed(each, names) for each in value) if isinstance(value, tuple) else value


def last_uses(nodes: Sequence[Node], returned: Any) -> dict[str, list[str]]:
    """Node -> values that are dead after it, including its own if unused. returned: read at the end."""
    last = {node.name: node.name for node in nodes}
    for node in nodes:
        for ref in node.operands():
            last[ref.name] = node.name
    kept = {ref.name for ref in refs_in(returned)}
    dead: dict[str, list[str]] = {}
    for name, at in last.items():
        if name not in kept:
            dead.setdefault(at, []).append(name)
    return dead


def operator_name(target: Any) -> str:
    """`aten.add.Tensor` -> add.Tensor, `aten.linear.default` -> linear."""
    if hasattr(target, "_schema"):
        return str(target).removeprefix("aten.").removesuffix(".default")
    return getattr(target, "__name__", str(target))


def submodule(model: nn.Module, path: str) -> nn.Module:
    """The module of this path, also of a scripted model, which has no `get_submodule`."""
    if not isinstance(model, torch.jit.ScriptModule):
        return model.get_submodule(path)
    return dict(model.named_modules(remove_duplicate=False))[path]


def with_parents(path: str) -> Iterator[str]:
    """A module's path and those of the modules around it.

    >>> list(with_parents("h.0.mlp"))
    ['h.0.mlp', 'h.0', 'h', '']
    """
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path
