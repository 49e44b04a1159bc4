"""What the first rank knows, on every rank."""

from __future__ import annotations

from typing import TypeVar

from meshloom.comm.objects import share
from meshloom.train.trainer import Trainer

T = TypeVar("T")


def of_first_rank(trainer: Trainer, value: T) -> T:
    """What rank 0 gives. All ranks call it."""
    return trainer.together(lambda replica: share(replica.context.world, value))[0]
