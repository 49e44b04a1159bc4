"""The loss scale over thousands of steps, which no verification takes: the state machine that ranks have, beside one device's."""

from __future__ import annotations

import torch

from meshloom.core.losses.loss_scale import LossScale
from meshloom.core.plan import Plan
from meshloom.replica.loss_sums import LossSums
from meshloom.verify.between_steps.checks import BetweenSteps
from meshloom.verify.reference.loss_scaling import ReferenceScale

_STEPS = 6800
_OVERFLOWS = (
    0,
    1,
    700,
    4710,
    4711,
)  # it grows after 2,000 good steps: twice between the third and the fourth, and once after the last
_RESUMED = (350, 2699, 2700)  # steps before which it is saved and resumed


def scale_over_time(plan: Plan) -> list[BetweenSteps]:
    """Compares them step by step, if the plan has a scale."""
    right, sums = ReferenceScale(plan), LossSums.of(plan, torch.device("cpu"))
    if not right.is_used:
        return []
    facts: list[str] = []
    for step in range(_STEPS):
        if step in _RESUMED and sums.scale is not None:
            sums.scale = LossScale.from_dict(sums.scale.to_dict())
        ours = sums.scale.scale if sums.scale else 1.0
        if ours != right.value:
            earlier = ", ".join(str(each) for each in _OVERFLOWS if each < step)
            facts.append(f"In step {step} it is {ours:g}, and {right.value:g} on one device, where gradients overflow in steps {earlier}.")  # fmt: skip
            break
        sums.overflowed = right.overflowed = step in _OVERFLOWS
        sums.end_update()
        right.end()
    return [BetweenSteps(what=f"the loss scale over {_STEPS} steps", facts=facts)]
