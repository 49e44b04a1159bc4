"""Bugs of operators that are divided."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import meshloom.program.operators.sliced_draws as sliced_draws
from meshloom.comm.pieces import take
from meshloom.optimizer import clipping
from tests.planted.bugs import PARTS, Patch, bug, wrap


@bug("texts-adamw", "tp=3", causes="same_draws|division", module=None)
def parts_of_masks_are_those_of_the_first_rank(patch: Patch) -> None:
    def first(right: Any, pieces: Any, rank: int, whole: Tensor) -> Tensor:
        mine = take(pieces, rank, whole)
        flat = whole.reshape(-1)[: mine.numel()]
        return flat.view(mine.shape).clone()

    wrap(patch, sliced_draws, "take", first)


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
