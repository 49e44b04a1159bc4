"""The indices of a tensor that each rank holds, and copies between a full tensor and its pieces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from torch import Tensor

Interval = tuple[int, int]  # start, stop
Runs = tuple[Interval, ...]  # of indices: in order, none empty, none adjacent to the next


@dataclass(frozen=True)
class Pieces:
    """The blocks of a tensor of `shape` that ranks hold. held: rank -> dim -> its runs of indices; None: all.

    ends: of each dim whose indices stand for sections of several elements, their cumulative sizes from 0 to
        the total. Elements of such pieces can be counted, but not copied.
    """

    shape: tuple[int, ...]
    held: tuple[tuple[Runs | None, ...], ...]
    ends: tuple[tuple[int, ...], ...] | None = field(default=None, repr=False)

    @property
    def num_ranks(self) -> int:
        return len(self.held)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of a rank's piece.

        >>> Pieces((4, 5), ((None, ((0, 3),)), (None, ((3, 5),)))).local_shape(1)
        (4, 2)
        """
        return self._local_shapes[rank]

    def num_elements(self, rank: int) -> int:
        """Number of elements of a rank's piece."""
        return self._counts[rank]

    @cached_property
    def most_elements(self) -> int:
        """Number of elements of the largest piece."""
        return max(self._counts)

    @cached_property
    def equal_dim(self) -> int | None:
        """The dim that ranks hold equal parts of, one run of indices each, in their order, and all of the other dims; None: they do
        not.

        >>> Pieces((4, 6), ((None, ((0, 3),)), (None, ((3, 6),)))).equal_dim
        1
        """
        dims = [dim for dim in range(len(self.shape)) if any(row[dim] is not None for row in self.held)]
        if len(dims) != 1 or self.ends is not None or self.shape[dims[0]] % self.num_ranks:
            return None
        part = self.shape[dims[0]] // self.num_ranks
        rows = [((rank * part, (rank + 1) * part),) for rank in range(self.num_ranks)]
        return dims[0] if part and [row[dims[0]] for row in self.held] == rows else None

    @cached_property
    def _local_shapes(self) -> list[tuple[int, ...]]:
        return [self._shape_of(row) for row in self.held]

    @cached_property
    def _counts(self) -> list[int]:
        return [math.prod(shape) for shape in self._local_shapes]

    def _shape_of(self, row: tuple[Runs | None, ...]) -> tuple[int, ...]:
        if self.ends is not None:
            return tuple(
                ends[-1] if runs is None else sum(ends[stop] - ends[start] for start, stop in runs)
                for ends, runs in zip(self.ends, row, strict=True)
            )
        return tuple(
            size if runs is None else sum(stop - start for start, stop in runs)
            for size, runs in zip(self.shape, row, strict=True)
        )

    @property
    def size(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape if self.ends is None else (ends[-1] for ends in self.ends))

    @cached_property
    def is_whole(self) -> bool:
        """Whether every rank holds the full tensor."""
        return all(runs is None for row in self.held for runs in row)

    @cached_property
    def is_shared(self) -> bool:
        """Whether several ranks hold the same element."""
        return _is_shared(self)

    def intersection(self, rank: int, other: Pieces, others_rank: int) -> Pieces:
        """The intersection of `rank`'s piece here and `others_rank`'s of `other`, held by every rank."""
        both = tuple(map(_common, self.held[rank], other.held[others_rank]))
        return Pieces(self.shape, (both,) * self.num_ranks, self.ends)


def whole(shape: Sequence[int], num_ranks: int) -> Pieces:
    """The full tensor on every rank."""
    return Pieces(tuple(shape), ((None,) * len(shape),) * num_ranks)


def owned(pieces: Pieces) -> Pieces:
    """The same pieces, with every element left to the first rank that holds it.

    >>> owned(Pieces((4,), ((((0, 3),),), (((1, 4),),)))).held
    ((((0, 3),),), (((3, 4),),))
    """
    return _owned(pieces) if pieces.is_shared else pieces


def take(pieces: Pieces, rank: int, tensor: Tensor) -> Tensor:
    """A rank's piece [local_shape] of a full tensor; a view where that is possible."""
    for dim, runs in enumerate(pieces.held[rank]):
        if runs is not None:
            parts = [tensor.narrow(dim, start, stop - start) for start, stop in runs or ((0, 0),)]
            tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return tensor


def place(pieces: Pieces, rank: int, part: Tensor) -> Tensor:
    """A full tensor of zeros, with a rank's piece in its place."""
    if all(runs is None for runs in pieces.held[rank]):
        return part
    full = part.new_zeros(pieces.shape)
    put(pieces, rank, part, full)
    return full


def put(pieces: Pieces, rank: int, part: Tensor, into: Tensor) -> None:
    """Write a rank's piece to its place in a full tensor."""
    for target, source in _blocks(pieces.held[rank], into, part):
        target.copy_(source)


def assemble(pieces: Pieces, parts: Sequence[Tensor]) -> Tensor:
    """The full tensor of all ranks' pieces. Elements of several ranks are those of the first."""
    if all(runs is None for runs in pieces.held[0]):
        return parts[0]
    full = parts[0].new_empty(pieces.shape)
    for rank in reversed(range(pieces.num_ranks)):
        put(pieces, rank, parts[rank], full)
    return full


def embed(inner: Pieces, outer: Pieces, rank: int, part: Tensor) -> Tensor:
    """A rank's piece of `outer`: zeros, with its piece `part` of `inner` in its place."""
    return part if inner == outer else take(outer, rank, place(inner, rank, part)).clone()


def _blocks(held: Sequence[Runs | None], full: Tensor, part: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Pairs of equal blocks of a full tensor and of a piece of it."""
    pairs = [(full, part)]
    for dim, runs in enumerate(held):
        if runs is None:
            continue
        cut: list[tuple[Tensor, Tensor]] = []
        at = 0
        for start, stop in runs:
            count = stop - start
            cut += [(one.narrow(dim, start, count), other.narrow(dim, at, count)) for one, other in pairs]
            at += count
        pairs = cut
    return pairs


def _common(mine: Runs | None, theirs: Runs | None) -> Runs | None:
    if mine is None or theirs is None:
        return theirs if mine is None else mine
    runs: list[Interval] = []
    place = 0
    for a, b in mine:  # both are in order
        while place < len(theirs) and theirs[place][1] <= a:
            place += 1
        at = place
        while at < len(theirs) and theirs[at][0] < b:
            runs.append((max(a, theirs[at][0]), min(b, theirs[at][1])))
            at += 1
    return tuple(runs)


def _without(mine: Runs, theirs: Runs) -> Runs:
    runs: list[Interval] = []
    place = 0
    for start, stop in mine:
        while place < len(theirs) and theirs[place][1] <= start:
            place += 1
        at = place
        while at < len(theirs) and theirs[at][0] < stop:
            if start < theirs[at][0]:
                runs.append((start, theirs[at][0]))
            start = theirs[at][1]
            at += 1
        if start < stop:
            runs.append((start, stop))
    return tuple(runs)


@lru_cache(maxsize=4096)
def _is_shared(pieces: Pieces) -> bool:
    total = pieces.size
    if sum(pieces.num_elements(rank) for rank in range(pieces.num_ranks)) != total:
        return True
    rows = pieces.held
    return any(_meet(rows[one], rows[other]) for one in range(len(rows)) for other in range(one) if total)


def _meet(mine: Sequence[Runs | None], theirs: Sequence[Runs | None]) -> bool:
    return all(common is None or bool(common) for common in map(_common, mine, theirs))


@lru_cache(maxsize=4096)
def _owned(pieces: Pieces) -> Pieces:
    rows: list[tuple[Runs | None, ...]] = []
    for rank, row in enumerate(pieces.held):
        left: tuple[Runs | None, ...] | None = row
        for earlier in pieces.held[:rank]:
            left = _left_over(left, earlier, pieces.shape) if left is not None else None
        rows.append(left if left is not None else ((),) * len(row) if row else row)
    return Pieces(pieces.shape, tuple(rows), pieces.ends)


def _left_over(
    mine: tuple[Runs | None, ...], theirs: tuple[Runs | None, ...], shape: Sequence[int]
) -> tuple[Runs | None, ...] | None:
    """The block of `mine` without `theirs`; None if it is empty. Raises `ValueError` if it is not a block."""
    if not _meet(mine, theirs):
        return mine
    full = [runs if runs is not None else ((0, size),) for runs, size in zip(mine, shape, strict=True)]
    others = [runs if runs is not None else ((0, size),) for runs, size in zip(theirs, shape, strict=True)]
    open_dims = [dim for dim in range(len(full)) if _without(full[dim], others[dim])]
    if not open_dims:
        return None
    if len(open_dims) > 1:
        raise ValueError("what two ranks hold of a tensor overlaps in more than one dim")
    (dim,) = open_dims
    return *mine[:dim], _without(full[dim], others[dim]), *mine[dim + 1 :]
