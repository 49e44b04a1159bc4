"""The one optimizer path over parameters that are divided along tp does what the user's own loop does on one device."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from shards_world import Grid, one_device, pieces_of_net
from test_optimizer import BUILDS, assert_equal, job
from torch.optim import lr_scheduler

from meshloom.job import Job

STEPS = 3
PLANS = [(1, 2, 0), (1, 4, 0), (2, 2, 0), (2, 3, 1), (3, 2, 1)]  # dp, tp, zero
SOME = ["momentum", "AdamW", "initial state", "Adafactor", "muon and adamw", "trust ratio", "together", "own list", "decay groups"]


def scheduled(name: str, **settings: Any) -> Job:
    schedule: Any = lambda made: [lr_scheduler.CosineAnnealingLR(each, 10) for each in (made if isinstance(made, list) else [made])]  # noqa: E731
    return job(BUILDS[name], scheduler=schedule, **settings)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", SOME)
def test_every_optimizer_does_what_it_does_on_one_device(name: str, plan: tuple[int, int, int]):
    dp, tp, zero = plan
    the_job = scheduled(name)
    expected, _ = one_device(the_job, dp, STEPS)
    grid = Grid(the_job, dp, tp, zero, seed=tp + dp)
    for step in range(STEPS):
        assert grid.step(step) == [None] * (dp * tp)
    assert_equal(grid.parameters(), expected, "parts")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", list(BUILDS))
def test_every_optimizer_on_more_divisions(name: str, plan: tuple[int, int, int], seed: int):
    dp, tp, zero = plan
    the_job = job(BUILDS[name], clip_grad_norm=0.3)
    expected, _ = one_device(the_job, dp, STEPS)
    grid = Grid(the_job, dp, tp, zero, seed)
    for step in range(STEPS):
        grid.step(step)
    for each, value in grid.parameters().items():
        torch.testing.assert_close(value, expected[each], rtol=1e-10, atol=1e-12)  # the norm's sum has another order


@pytest.mark.parametrize("plan", PLANS, ids=str)
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
        assert counted["tp"] == {"all_reduce": 8} == updater.bytes_per_step("tp")
        assert counted["dp"] == ({"all_reduce": 8} if zero else {}) == updater.bytes_per_step("dp")


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_bytes_are_predicted_and_state_is_divided(plan: tuple[int, int, int]):
    dp, tp, zero = plan
    for name in ("muon and adamw", "trust ratio", "together"):
        grid = Grid(job(BUILDS[name]), dp, tp, zero, seed=2)
        for step in range(2):
            grid.step(step)
            for counted, updater in zip(grid.counted, grid.updaters, strict=True):
                for axis in ("dp", "tp"):
                    once = updater.bytes_once(axis) if step == 0 else {}
                    per_step = updater.bytes_per_step(axis)
                    predicted = {kind: per_step.get(kind, 0) + once.get(kind, 0) for kind in (*per_step, *once)}
                    assert {kind: count for kind, count in counted[axis].items() if count} == {
                        kind: count for kind, count in predicted.items() if count
                    }
        assert any(counted["tp"] for counted in grid.counted)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", ["AdamW", "trust ratio", "muon and adamw"])
def test_state_of_divided_parameters_is_divided(name: str, plan: tuple[int, int, int]):
    dp, tp, zero = plan
    grid = Grid(job(BUILDS[name]), dp, tp, zero, seed=2)
    divided = {each: pieces for each, pieces in pieces_of_net(tp, 2).items() if not pieces.is_whole}
    held = [sum(each.tensor.numel() for held in updater._held for each in held if each.name in divided) for updater in grid.updaters]
    total = sum(math.prod(pieces.shape) for pieces in divided.values())
    parts = sum(pieces.num_elements(rank) for pieces in divided.values() for rank in range(tp))  # with what several ranks hold
    copies = 1 if zero else dp
    if name == "trust ratio":
        assert sum(held) == total * copies
    elif name == "AdamW":
        assert sum(held) == parts * copies
    assert max(held) <= 0.7 * total  # parts are uneven on purpose


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("name", [name for name in SOME if name != "own list"])
def test_a_checkpoint_goes_on_under_any_plan(name: str, zero: int, tmp_path: Path):
    the_job = scheduled(name, clip_grad_norm=10.0)
    first = Grid(the_job, 2, 2, zero, seed=3)
    for step in range(2):
        first.step(step)
    rates = first.updaters[0].learning_rates()
    directory = first.save(tmp_path / "first", 2)
    for counted, updater, shards, model in zip(first.counted, first.updaters, first.shards, first.models, strict=True):
        weights = shards.weights_bytes(model)
        assert counted["tp"].get("all_gather", 0) == updater.bytes_per_save("tp").get("all_gather", 0) + weights
        assert counted["dp"].get("all_gather", 0) == updater.bytes_per_save("dp").get("all_gather", 0)
    first.step(2)
    expected = first.parameters()
    for dp, tp, zero2 in ((1, 3, 0), (1, 1, 0), (2, 2, zero), (3, 2, 1), (2, 1, 1)):
        second = Grid(the_job, dp, tp, zero2, seed=4)
        second.load(directory)
        assert all(each.learning_rates() == rates for each in second.updaters)
        second.step(2)
        for each, value in second.parameters().items():
            torch.testing.assert_close(value, expected[each], rtol=1e-9, atol=1e-11, msg=lambda text, each=each: f"{each}: {text}")
