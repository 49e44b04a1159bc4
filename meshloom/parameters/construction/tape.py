"""The tape of a model's construction: the operators that made its tensors, in order, without their values.

    weight = torch.empty(4, 6)            0  empty         -> storage 0
    weight.normal_()                      1  normal_ #0    overwrites storage 0, draw 0
    weight[0].zero_()                     2  zero_         writes part of storage 0

Tensors are named by the storage in which they lie, so views, ties and `.data` need nothing of their own.
"""

from __future__ import annotations

import hashlib
import math
import platform
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


class NotRecordableError(Exception):
    """The construction does something that a tape cannot say."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: its storage's number, and how it lies there."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugated: bool = False
    negated: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    @property
    def is_contiguous(self) -> bool:
        """Whether elements are one after another, the last dim fastest."""
        expected = 1
        for size, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def covers(self, num_bytes: int) -> bool:
        """Whether it is contiguous and as large as a storage of `num_bytes`."""
        return self.is_contiguous and self.offset == 0 and self.numel * self.dtype.itemsize == num_bytes

    def within(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor in `storage`."""
        found = torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)
        found = found.conj() if self.conjugated else found
        return torch._neg_view(found) if self.negated else found  # pyright: ignore[reportPrivateUsage]


@dataclass(frozen=True, slots=True)
class TapeOperator:
    """One operator.

    args, kwargs: with a `Place` for every tensor. results: places of tensors in storages that it makes, None
        for other results, in the order of `tree_leaves`.
    reads: storages whose values it uses. writes: storages that it changes or makes; overwrites: those of
        which nothing stays.
    draw: its number among the operators that draw from the default generator; None: it does not draw.
    start: state of the default generator before it, or the number of the draw after which it continues, where
        that is not the one before it. generator: state of a generator of the user's own.
    default_dtype: torch's, at the time.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Place | None, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    overwrites: tuple[int, ...]
    default_dtype: torch.dtype
    draw: int | None = None
    start: bytes | int | None = None
    generator: bytes | None = None

    @property
    def drawn(self) -> Place:
        """What an operator that draws fills: a new tensor, or its first argument."""
        made = (each for each in self.results if each is not None)
        return next(made, None) or next(
            each for each in tree_leaves((self.args, self.kwargs)) if isinstance(each, Place)
        )

    def arguments(self, tensor: Callable[[Place], Tensor]) -> tuple[Any, dict[str, Any]]:
        """Its arguments, with `tensor(place)` for every place."""
        return tree_map(
            lambda each: tensor(each) if isinstance(each, Place) else each, (self.args, dict(self.kwargs))
        )

    def described(self) -> str:
        """What it does, as text that is equal on all ranks that do the same."""
        kwargs = {key: each for key, each in self.kwargs.items() if not isinstance(each, torch.Generator)}
        start = _hash(self.start) if isinstance(self.start, bytes) else self.start
        own = _hash(self.generator) if self.generator else None
        name = getattr(self.function, "__qualname__", self.function)
        return f"{name} {self.args} {kwargs} {self.results} {self.default_dtype} {start} {own}"


@dataclass
class Tape:
    """Operators in order, and the storages that they write.

    num_bytes: of each storage. constants: storages that existed before, with their values. final: state of
        the default generator at the end, as `TapeOperator.start`; None: that after the last draw.
    """

    operators: list[TapeOperator] = field(default_factory=list[TapeOperator])
    num_bytes: list[int] = field(default_factory=list[int])
    constants: dict[int, torch.UntypedStorage] = field(default_factory=dict[int, torch.UntypedStorage])
    digests: dict[int, str] = field(default_factory=dict[int, str])  # of constants, when first used
    draws: list[int] = field(default_factory=list[int])  # indices of operators
    first: bytes = b""  # state of the default generator before the first draw
    final: bytes | int | None = None
    _writers: list[list[int]] = field(default_factory=list[list[int]])

    def new_storage(self, num_bytes: int) -> int:
        """The number of a new storage."""
        self.num_bytes.append(num_bytes)
        self._writers.append([])
        return len(self.num_bytes) - 1

    def append(self, operator: TapeOperator) -> None:
        """Add an operator."""
        index = len(self.operators)
        if operator.draw is not None:
            assert operator.draw == len(self.draws)
            self.draws.append(index)
        self.operators.append(operator)
        for storage in operator.writes:
            self._writers[storage].append(index)

    def keep_constant(self, storage: int) -> None:
        """Before the first operator that writes a storage: if it is a constant, a copy keeps its values."""
        if storage in self.constants and not self.is_written(storage):
            self.constants[storage] = self.constants[storage].clone()

    def is_written(self, storage: int) -> bool:
        """Whether an operator writes it."""
        return bool(self._writers[storage])

    def needed(self, wanted: Iterable[int], before: int | None = None) -> list[int]:
        """Indices, in order, of the operators on which the values of some storages depend. before: values at
        that index; None: at the end."""
        end = len(self.operators) if before is None else before
        waiting = [(storage, end) for storage in wanted]
        found: set[tuple[int, int]] = set()  # (storage, index of a writer)
        while waiting:
            storage, until = waiting.pop()
            writers = self._writers[storage]
            for index in reversed(writers[: bisect_left(writers, until)]):
                if (storage, index) in found:
                    break
                found.add((storage, index))
                operator = self.operators[index]
                waiting += [(each, index) for each in operator.reads]
                if storage in operator.overwrites:
                    break
        return sorted({index for _, index in found})

    def digest(self) -> str:
        """A hash of operators, constants, seeds, and of what else decides the bits of their results here."""
        hashed = hashlib.blake2b(digest_size=16)
        here = [torch.__version__, platform.machine(), torch.backends.cpu.get_cpu_capability()]
        final = _hash(self.final) if isinstance(self.final, bytes) else self.final
        seeded = bool(self.draws) and self.operators[self.draws[0]].start is not None
        first = None if seeded else _hash(self.first)
        for part in (*here, first, final, torch.get_num_threads(), sorted(self.digests.items())):
            hashed.update(f"{part}\n".encode())
        for operator in self.operators:
            hashed.update(operator.described().encode())
        return hashed.hexdigest()


def constant_digest(storage: torch.UntypedStorage) -> str:
    """A hash of the bytes of a storage on the CPU."""
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
    array: Any = flat.numpy()
    return hashlib.blake2b(array, digest_size=16).hexdigest()


def address(storage: torch.UntypedStorage) -> int:
    """Equal for two storages that are the same."""
    return storage._cdata  # pyright: ignore[reportPrivateUsage]


def _hash(state: bytes) -> str:
    return hashlib.blake2b(state, digest_size=16).hexdigest()
