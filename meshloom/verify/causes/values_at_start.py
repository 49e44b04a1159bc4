"""Whether ranks begin with the values that one device begins with: what both build, each for itself, may draw anew.

weights = np.random.default_rng().normal(size=(5, 7))      # in the job's file: others in each process
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshloom.comm.steps import Steps
from meshloom.replica.replica import Replica
from meshloom.replica.replica_state import each_of_state
from meshloom.verify.between_steps.checks import compared_with
from meshloom.verify.causes.of_elements import names_of
from meshloom.verify.reference.mistakes import Cause
from meshloom.verify.reference.reference import Reference

_UNITS = 2  # of the last place, of a tensor's norm


def differing_initially(
    replica: Replica, begins_with: Callable[[str, Tensor], bool] | None
) -> Steps[list[Cause]]:
    """What to say of a run that begins with other values; before the first step, on all ranks. begins_with: whether one device has
    a value, too; on rank 0 alone."""
    other: dict[str, bool] = {}  # whether it is zeros on the ranks

    def take(name: str, ours: Tensor) -> None:
        if begins_with is not None and not begins_with(name, ours):
            other[name] = not bool(ours.to_dense().any())

    yield from each_of_state(replica, take)
    if not other:
        return []
    why = "what builds them draws from something that has no seed, such as np.random.default_rng(), or ranks are not given what rank 0 builds"
    if all(other.values()):
        why = "they are zeros there, as ranks are not given what is built"
    return [
        Cause(
            "initial values",
            f"{names_of(other)} had other values on the ranks than on one device before the first step: {why}.",
        )
    ]


def held_by(reference: Reference, name: str) -> Tensor:
    """Its parameter, as it is updated, or buffer of this name."""
    updated = reference.updated.all
    return updated[name] if name in updated else reference.model.get_buffer(name)


def begins_with(reference: Reference, name: str, ours: Tensor) -> bool:
    """Whether one device has this value of a parameter or buffer, too, before its first step."""
    own, value = held_by(reference, name), ours.detach().to_dense().cpu()
    inexact = own.is_floating_point() or own.is_complex()
    tolerance = _UNITS * torch.finfo(own.dtype).eps if inexact else 0.0
    return own.shape == value.shape and compared_with(name, value, own, 0, tolerance).passed
