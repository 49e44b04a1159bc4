"""Collectives of a change of placement and their payloads, forward and backward (`collectives.py`)."""

from __future__ import annotations

from typing import Literal

from meshloom.comm.pieces import Pieces, owned
from meshloom.program.operators.collectives import Kind

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


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
    return (
        elements_of_sum(owned(before)) if after.is_shared else elements_of_gather(after, owned(before), rank)
    )


def elements_of_sum(after: Pieces) -> tuple[Collective, int]:
    """The collective that sums all ranks' values, and returns each rank's part in `after`."""
    if after.is_whole or after.is_shared:
        return "all_reduce", after.size
    return "reduce_scatter", after.num_ranks * _longest(after)


def elements_of_gather(before: Pieces, after: Pieces, rank: int) -> tuple[Collective, int]:
    """The collective that gathers parts, and returns each rank's part in `after`."""
    source = owned(before)
    if after.is_whole:
        return "all_gather", _longest(source)
    return "all_to_all", sum(
        source.intersection(rank, after, other).num_elements(rank) for other in range(source.num_ranks)
    )


def _longest(pieces: Pieces) -> int:
    return max(pieces.num_elements(rank) for rank in range(pieces.num_ranks))
