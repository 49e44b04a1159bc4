"""Bugs of operators that are divided."""

from __future__ import annotations

from typing import Any

from meshloom.optimizer import clipping
from tests.planted.bugs import PARTS, Patch, bug


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
