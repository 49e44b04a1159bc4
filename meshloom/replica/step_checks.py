"""Checks of a step and of what it left: its loss is a number, replicas agree, frozen parameters stayed frozen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshloom.comm.objects import collect
from meshloom.comm.steps import Steps
from meshloom.core.errors import DataError, TrainingError
from meshloom.data.data import Chunk
from meshloom.parameters.replica_check import first_difference

if TYPE_CHECKING:
    from meshloom.replica.replica import Replica


def check_identical(replica: Replica, step: int) -> Steps[None]:
    """Raise `TrainingError` naming the first parameter or buffer that differs between replicas."""
    found = yield from first_difference(replica.model, replica.replicas)
    if found is not None:
        name, number = found
        raise TrainingError(
            f"After step {step}, {name} differs between replicas dp=0 and dp={number}: something in the model or optimizer "
            "is not deterministic or not part of the exchange (a parameter changed outside the optimizer, a buffer written by one rank)."
        )


def check_team(replica: Replica, step: int) -> Steps[None]:
    """Raise `TrainingError` naming the first parameter or buffer that several ranks of the replica hold
    whole, and not alike."""
    wrong = yield from replica.engine.check_alike()
    if wrong is not None:
        raise TrainingError(
            f"After step {step}, {wrong}: something in the model or optimizer is not deterministic."
        )


def check_frozen(replica: Replica) -> None:
    """Raise `TrainingError` naming a parameter that was frozen when the replica was built and is not now."""
    for name, parameter in replica.frozen:
        if parameter.requires_grad:
            raise TrainingError(
                f"{name} was frozen when the Trainer was built and now has requires_grad=True. Build a new Trainer after unfreezing."
            )


def check_finite(
    replica: Replica, step: int, chunks: Sequence[Chunk], total: float, weight: float
) -> Steps[None]:
    """Raise the same error on all ranks when the loss of the global batch is no number."""
    if math.isfinite(total) and weight > 0:
        return
    if math.isfinite(total):
        raise DataError(
            f"The weights of all chunks of step {step} sum to {weight:g}, so there is no mean loss. Leave out batches without anything to average over."
        )
    here = yield from replica.engine.locate_nan(chunks, replica.scope)
    found = yield from collect(replica.seat.world, here)
    _, rank, where = min(
        ((each[0], rank, each[1]) for rank, each in enumerate(found) if each),
        default=(0, 0, "the sum over all chunks overflowed"),
    )
    raise TrainingError(
        f"The loss of step {step} is {total / weight if weight else math.nan:g}: rank {rank}, {where}. The parameters were not updated; "
        "lower the learning rate, clip gradients, or look at this batch."
    )
