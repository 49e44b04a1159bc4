"""A simulated step ends when the longest chain of waiting ends, and what is predicted to be sent is sent."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from meshloom.core.schedules import SCHEDULES
from meshloom.pipeline.schedules.builders import make_schedule
from meshloom.pipeline.schedules.schedule import Action, Schedule
from meshloom.pipeline.stages.intervals import StageCost
from meshloom.pipeline.stages.simulate import simulate, step_seconds
from meshloom.pipeline.stages.stage_traffic import StageTraffic, traffic_of_ranks, traffic_of_stages
from meshloom.pipeline.stages.stages import Crossing
from meshloom.program.ir.nodes import Meta


def stage(
    forward: float, backward: float, later: float = 0.0, sent: int = 0, handed_back: int = 0
) -> StageCost:
    return StageCost(
        module="", last_module="", forward_seconds=forward, backward_seconds=backward, later_seconds=later, parameters=0, parameter_bytes=0,
        state_bytes=0, kept_bytes=0, sent_bytes=sent, returned_bytes=0, handed_back_bytes=handed_back,
    )  # fmt: skip


def seconds_by_relaxation(
    schedule: Schedule, stages: list[StageCost], rate: float, sizes: list[float]
) -> float:
    """Starts are put off until nothing starts too early: the longest chain, by Bellman and Ford."""

    def takes(action: Action) -> float:
        one = stages[action.stage]
        whole = {
            "F": one.forward_seconds,
            "B": one.backward_seconds,
            "I": one.backward_seconds - one.later_seconds,
            "W": one.later_seconds,
        }
        return whole[action.kind] * sizes[action.microbatch]

    after: list[tuple[Action, Action, float]] = []  # before, after, seconds in between
    for row in schedule.actions:
        after += [(before, action, 0.0) for before, action in pairwise(row)]
    there = {action for _, action in schedule}
    for action in there:
        number, size = action.microbatch, sizes[action.microbatch]
        crosses = action.stage and schedule.ranks[action.stage - 1] != schedule.ranks[action.stage]
        if action.stage and action.kind == "F":
            after.append(
                (
                    Action(action.stage - 1, "F", number),
                    action,
                    crosses * stages[action.stage - 1].sent_bytes * size / rate,
                )
            )
        if action.stage and action.kind in "BI":
            back = next(
                each
                for each in (Action(action.stage - 1, "B", number), Action(action.stage - 1, "I", number))
                if each in there
            )
            after.append((action, back, crosses * stages[action.stage].handed_back_bytes * size / rate))
        if action.stage == len(stages) - 1 and action.kind in "BI":
            after.append((Action(action.stage, "F", number), action, 0.0))
    starts = dict.fromkeys(there, 0.0)
    moved = True
    while moved:
        moved = False
        for before, action, between in after:
            earliest = starts[before] + takes(before) + between
            if earliest > starts[action] + 1e-12:
                starts[action], moved = earliest, True
    return max(start + takes(action) for action, start in starts.items())


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_is_as_long_as_its_longest_chain(name: str):
    draw = random.Random(name)
    for ranks, microbatches in ((1, 2), (2, 1), (3, 4), (4, 7)):
        schedule = make_schedule(name, ranks, microbatches)
        stages = [
            stage(draw.random(), 1 + draw.random(), draw.random(), draw.randrange(9), draw.randrange(9))
            for _ in range(schedule.num_stages)
        ]
        sizes = [draw.random() for _ in range(microbatches)]
        found = simulate(schedule, stages, lambda num_bytes: num_bytes / 7.0, sizes=sizes)
        assert found.seconds == pytest.approx(seconds_by_relaxation(schedule, stages, 7.0, sizes), rel=1e-9)
        assert (
            step_seconds(schedule, lambda num_bytes: num_bytes / 7.0, sizes=sizes)(stages) == found.seconds
        )  # of the same numbers in the same order
        even = simulate(schedule, stages, lambda num_bytes: num_bytes / 7.0).seconds
        assert step_seconds(schedule, lambda num_bytes: num_bytes / 7.0)(stages) == even
        for rank in range(ranks):
            work = sum(stages[each].seconds for each in schedule.stages_of(rank)) * sum(sizes)
            assert found.idle_shares[rank] == pytest.approx(1 - work / found.seconds)


def test_the_share_of_even_stages_is_the_formula():
    for name, p, m in (("gpipe", 4, 8), ("1f1b", 3, 5)):
        stages = [stage(1.0, 2.0)] * p
        found = simulate(make_schedule(name, p, m), stages, lambda _: 0.0)
        assert (
            found.idle_share == pytest.approx((p - 1) / (m + p - 1)) == pytest.approx(found.even_idle_share)
        )


def test_traffic_is_the_formula():
    """R4.2 for a chain of three stages: C = sum over cuts (s_i b) 2 values, an integer value counting once;
    two of the stages lie on one rank."""
    torch = pytest.importorskip("torch")

    def crossing(source: int, destination: int, values: int, *, gradient: bool = True) -> Crossing:
        dtype = torch.float32 if gradient else torch.int64
        return Crossing(
            value=f"v{source}{destination}", source=source, destination=destination,
            meta=Meta(shape=(values,), dtype=dtype, stride=(1,), requires_grad=gradient),
        )  # fmt: skip

    s = [5, 7]
    batch = [3, 2]  # samples of the microbatches
    crossings = [
        [crossing(0, 1, s[0] * b), crossing(1, 2, s[1] * b), crossing(0, 1, b, gradient=False)] for b in batch
    ]
    stages = traffic_of_stages(crossings)
    assert sum(each.num_bytes for each in stages) == 4 * 2 * sum(each * sum(batch) for each in s) + 8 * sum(
        batch
    )
    assert traffic_of_ranks(crossings, (0, 1, 0)) == (
        StageTraffic(source=0, destination=1, forward_bytes=4 * 5 * 5 + 8 * 5, backward_bytes=4 * 5 * 5),
        StageTraffic(source=1, destination=0, forward_bytes=4 * 7 * 5, backward_bytes=4 * 7 * 5),
    )
    assert traffic_of_ranks(crossings, (0, 0, 0)) == ()
