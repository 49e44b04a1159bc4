"""A schedule on shared cores: with as many cores as ranks it is the schedule on paper, with one core nothing
runs side by side."""

from __future__ import annotations

import random

import pytest

from meshloom.pipeline.schedules.builders import make_schedule
from meshloom.pipeline.schedules.schedule import Action
from meshloom.pipeline.schedules.timing import run_on_paper
from meshloom.planner.shared_cores import Effort, run_on_cores


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 1), (2, 5), (3, 6), (4, 8)])
@pytest.mark.every
def test_with_a_core_for_each_rank_it_is_the_schedule_on_paper(
    name: str, num_ranks: int, num_microbatches: int
):
    schedule = make_schedule(name, num_ranks, num_microbatches, 2 if name in ("interleaved", "zb-v") else 1)
    draw = random.Random(f"{name} {num_ranks} {num_microbatches}")
    seconds = {action: draw.uniform(0.5, 2.0) for _, action in schedule}
    sent = {action: draw.uniform(0.0, 0.5) for _, action in schedule}
    on_paper = run_on_paper(schedule, seconds.__getitem__, lambda before, after: sent[before])
    shared = run_on_cores(
        schedule,
        # Talking and computing come one after the other, so it does not matter how an action is divided into
        # them.
        lambda action: Effort(
            alone_seconds=0.75 * seconds[action], communication_seconds=0.25 * seconds[action]
        ),
        lambda before, after: sent[before],
        lambda busy: 1.0,
    )
    assert shared.seconds == pytest.approx(on_paper.length, rel=1e-9)
    assert shared.busy_seconds == pytest.approx(on_paper.busy, rel=1e-9)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_on_one_core_a_step_takes_the_sum_of_all_actions(name: str):
    schedule = make_schedule(name, 3, 6)
    draw = random.Random(name)
    seconds = {action: draw.uniform(0.5, 2.0) for _, action in schedule}
    shared = run_on_cores(
        schedule, lambda action: Effort(alone_seconds=seconds[action]), lambda before, after: 0.0, float
    )
    assert shared.seconds == pytest.approx(sum(seconds.values()), rel=1e-9)


def test_two_ranks_share_a_core_only_while_both_compute():
    """0F0 1 s; then 0F1 and 1F0 of 1 s each side by side take 2 s; 1F1 1 s, and the backwards likewise from
    the other end: no overlap with 1f1b here.

    rank 0   |0F0|  0F1  |           |0B0|   |0B1|
    rank 1       |  1F0  |1B0|  ...
    """
    schedule = make_schedule("gpipe", 2, 2)

    def effort(action: Action) -> Effort:
        return Effort(alone_seconds=1.0 if action.kind == "F" else 0.0)

    assert run_on_cores(
        schedule, effort, lambda before, after: 0.0, lambda busy: 1.0
    ).seconds == pytest.approx(3.0)
    assert run_on_cores(schedule, effort, lambda before, after: 0.0, float).seconds == pytest.approx(4.0)
