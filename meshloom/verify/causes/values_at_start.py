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
_ALIKE = 0.02  # of the elements, which are not alike by chance
_DRAWN = "what builds them draws from something that has no seed, such as np.random.default_rng(), or ranks are not given what rank 0 builds"
_SOME = "some of their elements are right, so that ranks are not given what is built, or a part of it is in another place"


def differing_initially(
    replica: Replica, other_at_start: Callable[[str, Tensor], str] | None
) -> Steps[list[Cause]]:
    """What to say of a run that begins with other values; before the first step, on all ranks. other_at_start: in which way a value is another than
    one device's; on rank 0 alone."""
    other: dict[str, str] = {}

    def take(name: str, ours: Tensor) -> None:
        if other_at_start is not None and (way := other_at_start(name, ours)):
            other[name] = way

    yield from each_of_state(replica, take)
    if not other:
        return []
    ways = set(other.values())
    why = ways.pop() if len(ways) == 1 else _DRAWN
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


def other_at_start(reference: Reference, name: str, ours: Tensor) -> str:
    """In which way this value of a parameter or buffer is another than one device has before its first step; "": it is not."""
    own, value = held_by(reference, name).detach(), ours.detach().to_dense().cpu()
    inexact = own.is_floating_point() or own.is_complex()
    tolerance = _UNITS * torch.finfo(own.dtype).eps if inexact else 0.0
    if own.shape == value.shape and compared_with(name, value, own, 0, tolerance).passed:
        return ""
    if not bool(value.any()):
        return "they are zeros there, as ranks are not given what is built"
    if own.shape != value.shape or not own.is_floating_point():
        return _DRAWN
    right = own.to_dense().cpu().to(value.dtype)
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(value, right.to(dtype).to(value.dtype)):
            return f"they are one device's, rounded to {str(dtype).removeprefix('torch.')} on the way"
    same = float((value == right).double().mean())
    return _SOME if same > _ALIKE else _DRAWN
