"""The one optimizer path over parameters that are divided along tp does what the user's own loop does on one
device."""

from __future__ import annotations

import gc
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from shards_world import Grid, one_device, pieces_of_net
from test_optimizer import BUILDS, assert_equal, job, job_of
from torch import nn
from torch.optim import lr_scheduler

from meshloom.core.job import Job, NamedParameters
from meshloom.telemetry.traffic import Traffic
from tests.covering import in_turn

STEPS = 3
PLANS = [(1, 2, 0), (1, 4, 0), (2, 2, 0), (2, 3, 1), (3, 2, 1)]  # dp, tp, zero
FEWER = [
    PLANS[0],
    PLANS[3],
    *(pytest.param(plan, marks=pytest.mark.long) for plan in (PLANS[1], PLANS[2], PLANS[4])),
]
SOME = [
    "momentum",
    "AdamW",
    "initial state",
    "Adafactor",
    "muon and adamw",
    "trust ratio",
    "together",
    "own list",
    "decay groups",
]


def scheduled(name: str, **settings: Any) -> Job:
    schedule: Any = lambda made: [  # noqa: E731
        lr_scheduler.CosineAnnealingLR(each, 10) for each in (made if isinstance(made, list) else [made])
    ]
    return job_of(name, scheduler=schedule, **settings)


@pytest.mark.covering("(1, 2, 0)", "(2, 3, 1)")
@pytest.mark.long
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", SOME)
@pytest.mark.every
def test_every_optimizer_does_what_it_does_on_one_device(name: str, plan: tuple[int, int, int]):
    dp, tp, zero = plan
    the_job = scheduled(name)
    expected, _ = one_device(the_job, dp, STEPS)
    grid = Grid(the_job, dp, tp, zero, seed=tp + dp)
    for step in range(STEPS):
        assert grid.step(step) == [None] * (dp * tp)
    assert_equal(grid.parameters(), expected, "parts")


@pytest.mark.parametrize("plan", FEWER, ids=str)
@pytest.mark.parametrize("largest", [0.05, 1e6])
def test_clipping_counts_every_element_once(largest: float, plan: tuple[int, int, int]):
    dp, tp, zero = plan
    the_job = job(BUILDS["AdamW"], clip_grad_norm=largest)
    expected, norms = one_device(the_job, dp, STEPS)
    grid = Grid(the_job, dp, tp, zero, seed=1)
    for step in range(STEPS):
        found = grid.step(step)
        assert len(set(found)) == 1  # to the bit
        assert found[0] == pytest.approx(norms[step], rel=1e-12)  # order of the sum
    for name, each in grid.parameters().items():
        torch.testing.assert_close(each, expected[name], rtol=1e-10, atol=1e-12)
    for counted, updater in zip(grid.counted, grid.updaters, strict=True):
        per_step = updater.expected_bytes().per_step.over(["tp", "dp"])
        assert counted["tp"] == {"all_reduce": 8} == per_step.bytes["tp"]
        assert counted["dp"] == ({"all_reduce": 8} if zero else {}) == per_step.bytes["dp"]


@pytest.mark.long
@pytest.mark.covering("(1, 2, 0)", "(2, 3, 1)")
@pytest.mark.parametrize("plan", FEWER, ids=str)
def test_bytes_are_predicted_and_state_is_divided(plan: tuple[int, int, int]):
    dp, tp, zero = plan
    for name in ("muon and adamw", "trust ratio", "together"):
        grid = Grid(job_of(name), dp, tp, zero, seed=2)
        for step in range(2):
            grid.step(step)
            for counted, updater in zip(grid.counted, grid.updaters, strict=True):
                expected = updater.expected_bytes()
                predicted = expected.per_step if step else expected.after(steps=1)
                assert predicted.over(["dp", "tp"]) == Traffic(counted).over(["dp", "tp"])
        assert any(counted["tp"] for counted in grid.counted)


@pytest.mark.parametrize("plan", FEWER, ids=str)
@pytest.mark.parametrize("name", ["AdamW", "trust ratio", "muon and adamw"])
def test_state_of_divided_parameters_is_divided(name: str, plan: tuple[int, int, int]):
    dp, tp, zero = plan
    grid = Grid(job_of(name), dp, tp, zero, seed=2)
    divided = {each: pieces for each, pieces in pieces_of_net(tp, 2).items() if not pieces.is_whole}
    held = [
        sum(each.tensor.numel() for held in updater.updated.held for each in held if each.name in divided)
        for updater in grid.updaters
    ]
    total = sum(math.prod(pieces.shape) for pieces in divided.values())
    # with what several ranks hold
    parts = sum(pieces.num_elements(rank) for pieces in divided.values() for rank in range(tp))
    copies = 1 if zero else dp
    if name == "trust ratio":
        assert sum(held) == total * copies
    elif name == "AdamW":
        assert sum(held) == parts * copies
    assert max(held) <= 0.7 * total  # parts are uneven on purpose


@pytest.mark.parametrize("name", ["AdamW", "initial state", "muon and adamw", "trust ratio"])
@pytest.mark.long
def test_whole_parameters_are_let_go(name: str):
    # Where no rank keeps a whole parameter the only ones left are parts; where one does, that one has it.
    pieces = {each: parts for each, parts in pieces_of_net(2).items() if not parts.is_whole}
    wholes: list[dict[str, weakref.ref[nn.Parameter]]] = []

    def optimizer(named: NamedParameters) -> Any:
        wholes.append({each: weakref.ref(parameter) for each, parameter in named if each in pieces})
        return BUILDS[name](named)

    grid = Grid(job(optimizer), 1, 2)
    gc.collect()
    for refs, updater in zip(wholes, grid.updaters, strict=True):
        kept = {
            held.name
            for per_optimizer in updater.updated.held
            for held in per_optimizer
            if held.shards is None
        }
        assert {each for each, ref in refs.items() if ref() is not None} == kept & pieces.keys()
    if name in ("AdamW", "initial state"):
        assert all(ref() is None for refs in wholes for ref in refs.values())


@pytest.mark.covering("momentum-0", "Adafactor-1", "muon and adamw-0")
@pytest.mark.long
@pytest.mark.parametrize(("name", "zero"), in_turn([name for name in SOME if name != "own list"], [0, 1]))
def test_a_checkpoint_goes_on_under_any_plan(name: str, zero: int, tmp_path: Path):
    the_job = scheduled(name, clip_grad_norm=10.0)
    first = Grid(the_job, 2, 2, zero, seed=3)
    for step in range(2):
        first.step(step)
    rates = first.updaters[0].learning_rates()
    directory = first.save(tmp_path / "first", 2)
    first.step(2)
    expected = first.parameters()
    for dp, tp, zero2 in ((1, 3, 0), (1, 1, 0), (2, 2, zero), (3, 2, 1), (2, 1, 1)):
        second = Grid(the_job, dp, tp, zero2, seed=4)
        second.step(0)  # somewhere else, and back
        second.load(directory)
        assert all(each.learning_rates() == rates for each in second.updaters)
        second.step(2)
        for each, value in second.parameters().items():
            torch.testing.assert_close(
                value, expected[each], rtol=1e-9, atol=1e-11, msg=lambda text, each=each: f"{each}: {text}"
            )
