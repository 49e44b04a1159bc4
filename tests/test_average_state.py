"""The optimizer's state of replicas that stepped by themselves becomes one: means, first values, and what
only some of them have."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshloom.comm.recording import RecordedGroup
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.errors import JobError
from meshloom.optimizer.average_state import average_state
from meshloom.optimizer.state_pieces import OwnedSlice


def averaged(
    states: list[dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[dict[str, int]], list[dict[str, int]]]:
    """The state of each of some replicas of one parameter [2, 3] afterwards, and bytes as expected and
    as counted."""
    groups = [RecordedGroup(group, "dp") for group in simulated_groups(len(states))]
    parameters = [nn.Parameter(torch.zeros(2, 3)) for _ in states]
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in parameters]
    for parameter, optimizer, state in zip(parameters, optimizers, states, strict=True):
        if state:
            optimizer.state[parameter] = dict(state)
    held = [[OwnedSlice("weight", parameter, 0, 6, (2, 3))] for parameter in parameters]
    talk = simulated_groups(len(states))
    expected = in_turns(
        [
            partial(average_state, *each, torch.device("cpu"))
            for each in zip(optimizers, held, groups, talk, strict=True)
        ]
    )
    counted = [
        {
            name: group.counts[name].bytes if name in group.counts else 0
            for name in ("all_reduce", "broadcast")
        }
        for group in groups
    ]
    return (
        [optimizer.state[parameter] for parameter, optimizer in zip(parameters, optimizers, strict=True)],
        [dict(each.bytes["dp"]) for each in expected],
        counted,
    )


def test_values_per_element_are_averaged_over_those_that_have_them() -> None:
    one, two = torch.arange(6.0).view(2, 3), torch.ones(2, 3)
    found, told, counted = averaged([{"momentum": one}, {}, {"momentum": two}])
    for state in found:
        assert torch.equal(state["momentum"], (one + two) / 2)
    assert told == counted == [{"all_reduce": 24, "broadcast": 0}] * 3


def test_low_precision_is_averaged_in_float32() -> None:
    # in bfloat16 256 + 1 is 256
    values = [torch.full((2, 3), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0)]
    found, told, counted = averaged([{"momentum": value} for value in values])
    assert all(torch.equal(state["momentum"], torch.full((2, 3), 259 / 4).bfloat16()) for state in found)
    assert told == counted == [{"all_reduce": 24, "broadcast": 0}] * 4


def test_counters_codes_and_plain_values_are_the_first_ones() -> None:
    codes = torch.tensor([1, 2, 3], dtype=torch.uint8)
    found, told, counted = averaged(
        [
            {},
            {"step": torch.tensor(7.0), "codes": codes, "warm": True},
            {"step": torch.tensor(9.0), "codes": codes + 1, "warm": False},
        ]
    )
    for state in found:
        assert float(state["step"]) == 7.0 and state["warm"] is True
        assert torch.equal(state["codes"], codes) and state["codes"].dtype == torch.uint8
    assert told == counted == [{"all_reduce": 0, "broadcast": 3}] * 3


def test_replicas_keep_tensors_of_their_own() -> None:
    found, _, _ = averaged([{"momentum": torch.ones(2, 3)}, {"momentum": torch.zeros(2, 3)}])
    first, second = (state["momentum"] for state in found)
    first += 1
    assert isinstance(first, Tensor) and torch.equal(second, torch.full((2, 3), 0.5))


def test_nothing_is_sent_without_state() -> None:
    found, told, counted = averaged([{}, {}])
    assert found == [{}, {}] and told == counted == [{"all_reduce": 0, "broadcast": 0}] * 2


def test_what_cannot_be_averaged_is_said() -> None:
    with pytest.raises(
        JobError, match=r"^SGD cannot be averaged over replicas: in its state, it is a object"
    ):
        averaged([{"what": object()}, {}])
