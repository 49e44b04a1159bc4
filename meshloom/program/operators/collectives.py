"""Changes of placement (resharding) over a group, as autograd functions.

    from          to           forward          backward
    invariant     replicated   identity         all-reduce
    invariant     part         own part         all-gather
    invariant     partial      rank 0's only    identity
    partial       invariant    all-reduce       identity
    partial       part         reduce-scatter   all-gather
    part          invariant    all-gather       own part
    part          partial      pad with zeros   own part
    part a        part b       all-to-all       all-to-all

Replicated is the part that is everything: going to a smaller part sends nothing, and its backward is a
reduce-scatter of the gradient. If several ranks hold an index, the first of them owns it: only its value is
read, and only it gets the gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from meshloom.comm.group import Group, ReduceOp
from meshloom.comm.pieces import Pieces, assemble, embed, owned, place, put, take
from meshloom.core.errors import TrainingError

Kind = Literal["invariant", "partial", "part"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


class Joint(ABC):
    """An operator that ranks compute together."""

    @abstractmethod
    def run(self, group: Group, *args: Any, **kwargs: Any) -> Any:
        """Run on this rank."""


@dataclass(frozen=True, kw_only=True)
class Transition(Joint):
    """A change of placement of one value. before, after: the pieces that ranks hold (all unless sharded)."""

    source: Kind
    target: Kind
    before: Pieces
    after: Pieces

    def run(self, group: Group, value: Tensor) -> Tensor:
        """Run on this rank."""
        function: Any = _OnOneRank.apply
        return function(self, group, value)

    def __str__(self) -> str:
        return f"{self.source} to {self.target}"


class _OnOneRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, change: Transition, group: Group, value: Tensor) -> Tensor:
        ctx.change, ctx.group = change, group
        return _value(change, group, value)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        return None, None, (_twice if torch.is_grad_enabled() else _gradient)(ctx.change, ctx.group, given[0])


class _GradientOnOneRank(torch.autograd.Function):
    """Placements of a gradient's gradient are those of the value."""

    @staticmethod
    def forward(ctx: Any, change: Transition, group: Group, gradient: Tensor) -> Tensor:
        ctx.change, ctx.group = change, group
        return _gradient(change, group, gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        function: Any = _OnOneRank
        if torch.is_grad_enabled():
            return None, None, function.apply(ctx.change, ctx.group, gradients[0])
        return None, None, _value(ctx.change, ctx.group, gradients[0])


_twice: Any = _GradientOnOneRank.apply  # where the gradient will be differentiated itself


def refuse_second_derivative() -> None:
    """Raises `TrainingError` within a backward that is recorded, for what has a first derivative only."""
    if torch.is_grad_enabled():
        raise TrainingError(
            "A gradient that is taken with create_graph=True goes through what ranks compute together, which has no second derivative. "
            "Use a plan with dp and zero alone, which runs the module as it is."
        )


def _masked_to_owned(pieces: Pieces, rank: int, part: Tensor) -> Tensor:
    """A rank's part, with zeros where an earlier rank is the owner."""
    if pieces.is_whole:
        return part if rank == 0 else torch.zeros_like(part)
    if not pieces.is_shared:
        return part
    mine = owned(pieces)
    return embed(mine, pieces, rank, take_within(mine, pieces, rank, part))


def take_within(inner: Pieces, outer: Pieces, rank: int, part: Tensor) -> Tensor:
    """The part in `inner` of a rank's part in `outer`, which contains it."""
    return take(inner, rank, place(outer, rank, part))


def all_reduced(group: Group, value: Tensor, op: ReduceOp) -> Tensor:
    """`value`, overwritten by the sum or the maximum over all ranks."""
    group.all_reduce(value, op).wait()
    return value


def _value(change: Transition, group: Group, value: Tensor) -> Tensor:
    before, after = change.before, change.after
    if change.target == "partial":
        if change.source == "invariant":
            return value.clone() if group.rank == 0 else torch.zeros_like(value)
        return place(before, group.rank, _masked_to_owned(before, group.rank, value))
    if change.source == "invariant":
        return take(after, group.rank, value).clone()
    if change.source == "partial":
        return start_sum(after, group, value)()
    if before.is_whole:
        return take(after, group.rank, value).clone()
    return _gathered(before, after, group, value)


def _gradient(change: Transition, group: Group, gradient: Tensor) -> Tensor:
    before, after = change.before, change.after
    if change.target != "part":
        if change.source != "part":
            return gradient
        return _masked_to_owned(before, group.rank, take(before, group.rank, gradient).clone())
    if change.source == "part" and before.is_whole:  # was replicated: partial again
        return place(after, group.rank, gradient)
    if after.is_shared:
        return start_sum_back(change, group, place(after, group.rank, gradient))()
    wanted = _wanted_back(change)
    return embed(wanted, before, group.rank, _gathered(after, wanted, group, gradient))


def start_sum_back(
    change: Transition, group: Group, gradient: Tensor, *, ours: bool = False
) -> Callable[[], Tensor]:
    """Start summing the ranks' gradients of a value that `change` sharded; the returned function waits, and
    returns the gradient of this rank's original part.

    gradient: of the full value, this rank's term of the sum. ours: it has no other readers.
    """
    wanted = _wanted_back(change)
    summing = start_sum(wanted, group, gradient, ours=ours)
    return lambda: embed(wanted, change.before, group.rank, summing())


def _wanted_back(change: Transition) -> Pieces:
    """The pieces of a gradient that ranks get: all of it for an invariant value, the owned part of shards."""
    return owned(change.before) if change.source == "part" else change.before


def start_sum(after: Pieces, group: Group, value: Tensor, *, ours: bool = False) -> Callable[[], Tensor]:
    """Start adding up all ranks' `value`s; the returned function waits for this rank's part in `after`.

    By all-reduce if that is everything or shared, else by reduce-scatter. ours: `value` has no other readers,
    so it may be overwritten by the sum.
    """
    if after.is_whole or after.is_shared:
        total = value.contiguous() if ours else value.clone(memory_format=torch.contiguous_format)
        reducing = group.all_reduce(total)

        def all_of_it() -> Tensor:
            reducing.wait()
            return total if after.is_whole else take(after, group.rank, total).clone()

        return all_of_it
    rows = _rows_of(after, value, group.size)
    mine = value.new_empty(after.most_elements)
    scattering = group.reduce_scatter(mine, rows.reshape(-1))

    def part_of_it() -> Tensor:
        scattering.wait()
        return mine[: after.num_elements(group.rank)].reshape(after.local_shape(group.rank))

    return part_of_it


def _rows_of(after: Pieces, value: Tensor, size: int) -> Tensor:
    """What each rank gets of `value`: [rank, elements of the largest piece], with zeros after smaller ones."""
    if after.equal_dim is not None:
        return torch.stack(value.chunk(size, after.equal_dim))
    rows = value.new_empty(size, after.most_elements)
    for rank in range(size):
        count = after.num_elements(rank)
        rows[rank, :count].view(after.local_shape(rank)).copy_(take(after, rank, value))
        rows[rank, count:] = 0
    return rows


def _gathered(before: Pieces, after: Pieces, group: Group, value: Tensor) -> Tensor:
    """This rank's part in `after` of the value of which every rank has a part in `before`."""
    if after.is_whole:
        return start_gather(before, group, value)()
    source = owned(before)
    mine = take_within(source, before, group.rank, value) if before.is_shared else value
    here = place(source, group.rank, mine)
    common = [source.intersection(group.rank, after, rank) for rank in range(group.size)]
    theirs = [source.intersection(rank, after, group.rank) for rank in range(group.size)]
    counts = [each.num_elements(rank) for rank, each in enumerate(theirs)]
    sent = [take(each, group.rank, here).reshape(-1) for each in common]
    received = value.new_empty(sum(counts))
    group.all_to_all(received, torch.cat(sent), counts, [part.numel() for part in sent]).wait()
    whole = value.new_zeros(before.shape)
    for rank, (each, part) in enumerate(zip(theirs, received.split(counts), strict=True)):
        put(each, rank, part.view(each.local_shape(rank)), whole)
    return take(after, group.rank, whole).clone()


def start_gather(before: Pieces, group: Group, value: Tensor) -> Callable[[], Tensor]:
    """Start gathering all ranks' parts everywhere; the returned function waits for the full value."""
    source = owned(before)
    mine = take_within(source, before, group.rank, value) if before.is_shared else value
    longest = source.most_elements
    if mine.numel() == longest and mine.is_contiguous():
        row = mine.detach().reshape(-1)
    else:
        row = value.new_zeros(longest)
        row[: mine.numel()].view(mine.shape).copy_(mine)
    rows = value.new_empty(group.size * longest)
    gathering = group.all_gather(rows, row)

    def finish() -> Tensor:
        gathering.wait()
        if source.equal_dim is not None:
            return torch.cat(rows.view(group.size, *source.local_shape(0)).unbind(), source.equal_dim)
        parts = [
            rows[rank * longest : rank * longest + source.num_elements(rank)].view(source.local_shape(rank))
            for rank in range(group.size)
        ]
        return assemble(source, parts)

    return finish


# What is sent, without sending it.


def elements_of_change(
    source: Kind, target: Kind, before: Pieces, after: Pieces, rank: int, *, backward: bool
) -> tuple[Collective, int] | None:  # fmt: skip
    """The collective of a change of placement, and the elements of `rank`'s input. None: no communication."""
    if not backward:
        if target == "partial" or source == "invariant":
            return None
        if source == "partial":
            return elements_of_sum(after)
        return None if before.is_whole else elements_of_gather(before, after, rank)
    if target != "part":
        return None
    if source != "part":
        return elements_of_sum(before) if after.is_shared else elements_of_gather(after, before, rank)
    if before.is_whole:
        return None
    mine = owned(before)
    return elements_of_sum(mine) if after.is_shared else elements_of_gather(after, mine, rank)


def elements_of_sum(after: Pieces) -> tuple[Collective, int]:
    """The collective that sums all ranks' values, and returns each rank's part in `after`."""
    if after.is_whole or after.is_shared:
        return "all_reduce", after.size
    return "reduce_scatter", after.num_ranks * after.most_elements


def elements_of_gather(before: Pieces, after: Pieces, rank: int) -> tuple[Collective, int]:
    """The collective that gathers parts, and returns each rank's part in `after`."""
    source = owned(before)
    if after.is_whole:
        return "all_gather", source.most_elements
    return "all_to_all", sum(
        source.intersection(rank, after, other).num_elements(rank) for other in range(source.num_ranks)
    )
