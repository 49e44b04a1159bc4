"""Changes of placement: one small autograd function over a group, and the same on a list of all ranks'
tensors.

    from          to           forward          backward
    invariant     replicated   identity         all-reduce
    invariant     part         own part         all-gather
    invariant     partial      rank 0's only    identity
    partial       invariant    all-reduce       identity
    partial       part         reduce-scatter   all-gather
    part          invariant    all-gather       own part
    part          partial      zeros around it  own part
    part a        part b       all-to-all       all-to-all

Replicated is the part that is everything: from it to a smaller part nothing is sent, and the way back is a
reduce-scatter of the gradient. Where several ranks hold an index, the first of them speaks for it: it alone
is asked for the value, and it alone is given the gradient that others would be given again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from meshloom.comm.group import Group
from meshloom.comm.pieces import Pieces, assemble, embed, owned, place, put, take

Kind = Literal["invariant", "partial", "part"]


@runtime_checkable
class Joint(Protocol):
    """What the ranks compute together: on one of them over a group, or on all at once, where every operand is
    a list of all ranks'."""

    def run(self, group: Group, *args: Any) -> Any:
        """On this rank."""
        ...

    def run_all(self, *columns: Any) -> list[Any]:
        """On all ranks: one list per operand -> results[rank]."""
        ...


@dataclass(frozen=True, kw_only=True)
class Transition:
    """A change of placement of one value. before, after: who holds what (all of it, unless it is in
    parts)."""

    source: Kind
    target: Kind
    before: Pieces
    after: Pieces

    def run(self, group: Group, value: Tensor) -> Tensor:
        """On this rank."""
        function: Any = _OnOneRank.apply
        return function(self, group, value)

    def run_all(self, values: Sequence[Tensor]) -> list[Tensor]:
        """On all ranks at once: values[rank] -> results[rank]."""
        function: Any = _OnAllRanks.apply
        return list(function(self, *values))

    def __str__(self) -> str:
        return f"{self.source} to {self.target}"


class _OnOneRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, change: Transition, group: Group, value: Tensor) -> Tensor:
        ctx.change, ctx.group = change, group
        return _value(change, group, value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, _gradient(ctx.change, ctx.group, gradients[0])


class _OnAllRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, change: Transition, *values: Tensor) -> Any:
        ctx.change = change
        return tuple(_values(change, values))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *_gradients(ctx.change, gradients)


# All ranks at once: the value (or its gradient) is made whole, and everyone takes what is theirs.


def _values(change: Transition, values: Sequence[Tensor]) -> list[Tensor]:
    ranks = range(len(values))
    if change.target == "partial":
        if change.source == "invariant":
            return [
                value.clone() if rank == 0 else torch.zeros_like(value) for rank, value in enumerate(values)
            ]
        return [place(change.before, rank, _spoken_for(change.before, rank, values[rank])) for rank in ranks]
    if change.source == "partial":
        whole = _total(values)
    elif change.source == "invariant":
        whole = None
    else:
        whole = assemble(change.before, values)
    if whole is None:
        return [take(change.after, rank, values[rank]).clone() for rank in ranks]
    return [take(change.after, rank, whole).clone() for rank in ranks]


def _gradients(change: Transition, gradients: Sequence[Tensor]) -> list[Tensor]:
    ranks = range(len(gradients))
    if change.target == "part":
        whole = _total([place(change.after, rank, gradient) for rank, gradient in enumerate(gradients)])
    else:
        whole = None
    if change.source != "part":
        return [(whole if whole is not None else gradient).clone() for gradient in gradients]
    return [
        _spoken_for(
            change.before,
            rank,
            take(change.before, rank, whole if whole is not None else gradients[rank]).clone(),
        )
        for rank in ranks
    ]


def _total(values: Sequence[Tensor]) -> Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


def _spoken_for(pieces: Pieces, rank: int, part: Tensor) -> Tensor:
    """A rank's part, with zeros where an earlier rank speaks."""
    if pieces.is_whole:
        return part if rank == 0 else torch.zeros_like(part)
    if not pieces.is_shared:
        return part
    mine = owned(pieces)
    return embed(mine, pieces, rank, take_within(mine, pieces, rank, part))


def take_within(inner: Pieces, outer: Pieces, rank: int, part: Tensor) -> Tensor:
    """Of a rank's part in `outer`, that in `inner`, which lies within it."""
    return take(inner, rank, place(outer, rank, part))


# On one rank.


def _value(change: Transition, group: Group, value: Tensor) -> Tensor:
    before, after = change.before, change.after
    if change.target == "partial":
        if change.source == "invariant":
            return value.clone() if group.rank == 0 else torch.zeros_like(value)
        return place(before, group.rank, _spoken_for(before, group.rank, value))
    if change.source == "invariant":
        return take(after, group.rank, value).clone()
    if change.source == "partial":
        return _summed(after, group, value)
    if before.is_whole:
        return take(after, group.rank, value).clone()
    return _gathered(before, after, group, value)


def _gradient(change: Transition, group: Group, gradient: Tensor) -> Tensor:
    before, after = change.before, change.after
    if change.target != "part":
        if change.source != "part":
            return gradient
        return _spoken_for(before, group.rank, take(before, group.rank, gradient).clone())
    if change.source == "part" and before.is_whole:  # was replicated: partial again
        return place(after, group.rank, gradient)
    if after.is_shared:
        return start_sum_back(change, group, place(after, group.rank, gradient))()
    wanted = _wanted_back(change)
    return embed(wanted, before, group.rank, _gathered(after, wanted, group, gradient))


def start_sum_back(
    change: Transition, group: Group, gradient: Tensor, *, ours: bool = False
) -> Callable[[], Tensor]:
    """Start adding up the ranks' gradients of a value that `change` made parts of; the function returned
    waits, and gives that of what this rank had.

    gradient: of the whole value, this rank's share of the sum. ours: nobody else looks at it.
    """
    wanted = _wanted_back(change)
    summing = start_sum(wanted, group, gradient, ours=ours)
    return lambda: embed(wanted, change.before, group.rank, summing())


def _wanted_back(change: Transition) -> Pieces:
    """What each rank is given of a gradient: of an invariant value all of it, of parts what it alone speaks
    for."""
    return owned(change.before) if change.source == "part" else change.before


def _summed(after: Pieces, group: Group, value: Tensor) -> Tensor:
    return start_sum(after, group, value)()


def start_sum(after: Pieces, group: Group, value: Tensor, *, ours: bool = False) -> Callable[[], Tensor]:
    """Start adding up all ranks' `value`s; the function returned waits, and gives what this rank holds in
    `after`.

    By all-reduce if that is all of it or shared, else by reduce-scatter. ours: nobody else looks at `value`,
    so the sum may take its place.
    """
    if after.is_whole or after.is_shared:
        total = value.contiguous() if ours else value.clone(memory_format=torch.contiguous_format)
        reducing = group.all_reduce(total)

        def all_of_it() -> Tensor:
            reducing.wait()
            return total if after.is_whole else take(after, group.rank, total).clone()

        return all_of_it
    longest = max(after.num_elements(rank) for rank in range(group.size))
    rows = value.new_empty(group.size, longest)
    for rank in range(group.size):
        count = after.num_elements(rank)
        rows[rank, :count].view(after.local_shape(rank)).copy_(take(after, rank, value))
        rows[rank, count:] = 0
    mine = value.new_empty(longest)
    scattering = group.reduce_scatter(mine, rows.view(-1))

    def part_of_it() -> Tensor:
        scattering.wait()
        return mine[: after.num_elements(group.rank)].reshape(after.local_shape(group.rank))

    return part_of_it


def _gathered(before: Pieces, after: Pieces, group: Group, value: Tensor) -> Tensor:
    """What this rank holds in `after` of the whole, of which every rank holds a part."""
    if after.is_whole:
        return start_gather(before, group, value)()
    source = owned(before)
    mine = take_within(source, before, group.rank, value) if before.is_shared else value
    here = place(source, group.rank, mine)
    common = [source.intersection(group.rank, after, rank) for rank in range(group.size)]
    theirs = [source.intersection(rank, after, group.rank) for rank in range(group.size)]
    sent = [take(each, group.rank, here).reshape(-1) for each in common]
    received = value.new_empty(sum(each.num_elements(rank) for rank, each in enumerate(theirs)))
    group.all_to_all(
        received,
        torch.cat(sent),
        [each.num_elements(rank) for rank, each in enumerate(theirs)],
        [part.numel() for part in sent],
    ).wait()
    whole = value.new_zeros(before.shape)
    start = 0
    for rank, each in enumerate(theirs):
        count = each.num_elements(rank)
        put(each, rank, received[start : start + count].view(each.local_shape(rank)), whole)
        start += count
    return take(after, group.rank, whole).clone()


def start_gather(before: Pieces, group: Group, value: Tensor) -> Callable[[], Tensor]:
    """Start bringing all ranks' parts to every rank; the function returned waits, and gives the whole."""
    source = owned(before)
    mine = take_within(source, before, group.rank, value) if before.is_shared else value
    longest = max(source.num_elements(rank) for rank in range(group.size))
    if mine.numel() == longest and mine.is_contiguous():
        row = mine.detach().reshape(-1)
    else:
        row = value.new_zeros(longest)
        row[: mine.numel()].view(mine.shape).copy_(mine)
    rows = value.new_empty(group.size * longest)
    gathering = group.all_gather(rows, row)

    def finish() -> Tensor:
        gathering.wait()
        parts = [
            rows[rank * longest : rank * longest + source.num_elements(rank)].view(source.local_shape(rank))
            for rank in range(group.size)
        ]
        return assemble(source, parts)

    return finish
