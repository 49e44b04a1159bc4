"""Bugs of operators that are divided."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import meshloom.program.operators.collectives as collectives
import meshloom.program.operators.log_softmax as log_softmax
import meshloom.program.operators.sliced_draws as sliced_draws
from meshloom.comm.pieces import take
from meshloom.optimizer import clipping
from tests.planted.bugs import PARTS, Patch, bug, wrap


@bug("texts-adamw", "tp=2", causes="division|loss", module=None)
@bug("long-adamw", "tp=2", causes="division|loss", module=None)
def a_softmax_sums_its_part_alone(patch: Patch) -> None:
    right = log_softmax._LogSoftmax.forward

    def alone(ctx: Any, dim: int, largest: Any, total: Any, *xs: Tensor) -> Any:
        return right(ctx, dim, largest, lambda each: each, *xs)

    patch.setattr(log_softmax._LogSoftmax, "forward", staticmethod(alone))


@bug("texts-adamw", "tp=3", causes="same_draws|division", module=None)
@bug("long-adamw", "tp=3", causes="same_draws|division", module=None)
def parts_of_masks_are_those_of_the_first_rank(patch: Patch) -> None:
    def first(right: Any, pieces: Any, rank: int, whole: Tensor) -> Tensor:
        mine = take(pieces, rank, whole)
        flat = whole.reshape(-1)[: mine.numel()]
        return flat.view(mine.shape).clone()

    wrap(patch, sliced_draws, "take", first)


@bug("texts-adamw", "tp=3", causes="division|replicas", module=None)
@bug("mlp-sgd", PARTS, causes="division|replicas", module=None)
def gradients_of_what_was_cut_up_count_by_their_ranks(patch: Patch) -> None:
    def weighted(right: Any, change: Any, group: Any, gradient: Tensor, **settings: Any) -> Any:
        return right(change, group, gradient * (2 * (1 + group.rank) / (1 + group.size)), **settings)

    wrap(patch, collectives, "start_sum_back", weighted)


@bug("mlp-sgd", PARTS, causes="clipping|replicas", module=None)
def the_second_rank_clips_by_a_norm_of_its_own(patch: Patch) -> None:
    right = clipping.clip

    def own(gradients: Any, largest: float, *rest: Any, holders: Any = (), **settings: Any) -> Any:
        second = any(group.rank == 1 for group in holders)
        return (
            yield from right(
                gradients, largest * (0.9 if second else 1.0), *rest, holders=holders, **settings
            )
        )

    patch.setattr("meshloom.optimizer.updater.clip", own)


@bug("texts-adamw", "tp=2,dp=2", causes="division|replicas|forward", module=None)
def sums_over_parts_are_rounded_in_the_second_replica(patch: Patch) -> None:
    def rounded(right: Any, after: Any, group: Any, value: Tensor) -> Any:
        finish = right(after, group, value)
        turns[0] += 1
        low = turns[0] % 4 in (2, 3)
        return lambda: finish().bfloat16().to(value.dtype) if low else finish()

    turns = [0]
    wrap(patch, collectives, "start_sum", rounded)


assert torch
