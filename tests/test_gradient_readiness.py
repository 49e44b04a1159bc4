"""A gradient is complete when the last backward of this rank that uses its parameter has it, and not before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshloom.pipeline.runtime.gradient_readiness import Readiness
from meshloom.pipeline.schedules.builders import make_schedule
from meshloom.pipeline.schedules.schedule import Action


@pytest.mark.parametrize("each_microbatch", [False, True])
@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_a_parameter_of_two_stages_waits_for_both(schedule: str, each_microbatch: bool) -> None:
    made = make_schedule(schedule, 2, 2)
    first, last = made.stages_of(0)
    tied, alone = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    uses = {first: [tied, alone], last: [tied]}
    done = list[tuple[nn.Parameter, int]]()  # which were said to be ready, and in which action
    begun = list[Action]()
    readiness = Readiness(
        made, 0, uses, lambda each: done.append((each, len(begun) - 1)), each_microbatch=each_microbatch
    )
    readiness.begin()
    for action in made.actions[0]:
        begun.append(action)
        readiness.began(action)
        if action.kind in "BW":  # others have no gradients of parameters
            for parameter in uses[action.stage]:
                parameter.grad = torch.zeros(1)
                readiness.arrived(parameter)
        readiness.ended(action)

    backwards = [(number, each) for number, each in enumerate(made.actions[0]) if each.kind != "F"]
    for parameter in (tied, alone):
        stages = {stage for stage, used in uses.items() if any(each is parameter for each in used)}
        found = [number for each, number in done if each is parameter]
        if each_microbatch:
            lasts = sorted(
                max(n for n, each in backwards if each.stage in stages and each.microbatch == microbatch)
                for microbatch in range(2)
            )
        else:
            lasts = [max(n for n, each in backwards if each.stage in stages)]
        assert found == lasts
