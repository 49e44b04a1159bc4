"""Schedules are legal for any numbers, keep their bounds, and idle as their formulas say."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshloom.core.errors import PlanError
from meshloom.core.schedules import SCHEDULES
from meshloom.pipeline.schedules.builders import make_schedule
from meshloom.pipeline.schedules.check import check_schedule, most_in_flight
from meshloom.pipeline.schedules.schedule import Action, Schedule
from meshloom.pipeline.schedules.timing import Durations, run_on_paper

SIZES = st.integers(1, 6)
NAMES = st.sampled_from(list(SCHEDULES))


def stages_per_rank(name: str, wanted: int) -> int:
    return wanted if SCHEDULES[name].any_number else SCHEDULES[name].stages_per_rank


def bound(name: str, p: int, m: int, v: int, rank: int) -> int:
    """Activations in flight on a rank, from the papers: of one stage for one microbatch."""
    published = {
        "gpipe": m,
        "1f1b": p - rank,
        "interleaved": 2 * (p - rank - 1) + (v - 1) * p + 1 if v > 1 else p - rank,
        "zb-h1": p,
        "zb-v": 2 * p,
        "found": p - rank,
    }
    return min(m * v, published[name])


@pytest.mark.long
@given(name=NAMES, p=SIZES, m=st.integers(1, 17), v=st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_every_schedule_is_legal_and_keeps_its_bound(name: str, p: int, m: int, v: int):
    v = stages_per_rank(name, v)
    schedule = make_schedule(name, p, m, v)
    check_schedule(schedule)
    assert schedule.num_ranks == p and schedule.num_stages == p * v and schedule.num_microbatches == m
    for rank, most in enumerate(most_in_flight(schedule)):
        assert most <= bound(name, p, m, v, rank)
    assert Schedule.parse(str(schedule)) == schedule
    assert bool(schedule.split) == SCHEDULES[name].split


@pytest.mark.long
@given(
    name=NAMES, p=SIZES, m=st.integers(1, 12), v=st.integers(1, 3), transfer=st.floats(0, 2),
    costs=st.lists(st.floats(0.1, 5), min_size=54, max_size=54), sizes=st.lists(st.floats(0.2, 1), min_size=12, max_size=12),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_schedules_for_given_durations_are_legal_too(
    name: str, p: int, m: int, v: int, transfer: float, costs: list[float], sizes: list[float]
):
    v = stages_per_rank(name, v)
    durations = Durations(
        forward=costs[:18],
        input_gradient=costs[18:36],
        weight_gradient=costs[36:],
        transfer=transfer,
        sizes=sizes[:m],
    )
    schedule = make_schedule(name, p, m, v, durations)
    check_schedule(schedule)
    timed = run_on_paper(schedule, durations.of, lambda before, after: transfer)
    work = [sum(durations.of(action) for action in row) for row in schedule.actions]
    assert timed.busy == pytest.approx(work)
    assert timed.length >= max(work) - 1e-9
    for rank, row in enumerate(schedule.actions):
        for before, after in pairwise(row):
            assert timed.starts[after] >= timed.ends[before] - 1e-9, (
                f"rank {rank} runs {before} and {after} at a time"
            )


def idle(name: str, p: int, m: int, v: int = 1) -> float:
    """Units in which a rank has nothing to do, with forwards of 1 and backwards of 2 units in all of its
    stages."""
    v = stages_per_rank(name, v)
    takes = {"F": 1 / v, "B": 2 / v, "I": 1 / v, "W": 1 / v}
    return run_on_paper(make_schedule(name, p, m, v), lambda action: takes[action.kind]).length - 3 * m


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 5, 8, 16])
@pytest.mark.every
def test_idle_shares_are_the_formulas(p: int, m: int):
    for name in ("gpipe", "1f1b"):
        assert idle(name, p, m) == 3 * (p - 1)  # (p - 1) / (m + p - 1) of the whole
    for v in (2, 3):
        if m % p == 0:
            assert idle("interleaved", p, m, v) == pytest.approx(3 * (p - 1) / v)
    if m >= 2 * p - 1:
        assert idle("zb-h1", p, m) == p - 1  # Qi et al. (2024), table 2: (p - 1) (F + B - W)
        assert idle("zb-v", p, m) <= p - 1


@pytest.mark.parametrize(("p", "m"), [(4, 6), (3, 7), (4, 9), (2, 5), (8, 12)])
def test_an_incomplete_group_of_microbatches_still_gains_from_interleaving(p: int, m: int):
    assert idle("interleaved", p, m, 2) < idle("1f1b", p, m)


def test_zero_bubble_waits_less_than_half_of_1f1b():
    share = {name: idle(name, 4, 8) / (24 + idle(name, 4, 8)) for name in ("1f1b", "zb-h1", "zb-v")}
    assert share["1f1b"] == pytest.approx(3 / 11)
    assert share["zb-h1"] <= share["1f1b"] / 2 and share["zb-v"] <= share["zb-h1"]


ONE = make_schedule("1f1b", 2, 2)


def changed(rank: int, row: str) -> Schedule:
    rows = [*ONE.actions]
    rows[rank] = tuple(map(Action.parse, row.split()))
    return replace(ONE, actions=tuple(rows))


@pytest.mark.parametrize(
    ("schedule", "sentence"),
    [
        (changed(0, "0F0 0F1 0B0"), "Stage 0 of schedule 1f1b has F for microbatch 1. It needs F and B, or F, I and W."),
        (changed(0, "0F0 0F1 0B0 0B1 0B1"), "0B1 occurs 2 times"),
        (changed(0, "0F0 0F1 0B0 0B1 1F0"), "1F0 is listed on rank 0, but stage 1 of schedule 1f1b belongs to rank 1."),
        (changed(0, "0F0 0F1 0B0 0B1 0F2"), "0F2 on rank 0: schedule 1f1b has 2 stages and 2 microbatches."),
        (changed(1, "1F0 1B0 1B1 1F1"), "1B1 comes before 1F1 on rank 1"),
        (changed(1, "1F0 1W0 1I0 1F1 1B1"), "1W0 comes before 1I0 on rank 1"),
        (changed(1, "1F1 1B1 1F0 1I0"), "Stage 1 of schedule 1f1b has F I for microbatch 0"),
        (
            Schedule(name="x", ranks=(0, 1), num_microbatches=2, actions=(
                tuple(map(Action.parse, ["0F0", "0B0", "0F1", "0B1"])), tuple(map(Action.parse, ["1F1", "1B1", "1F0", "1B0"])),
            )),
            "Schedule x deadlocks: rank 0 must run 0B0 and waits for 1B0 of rank 1; rank 1 must run 1F1 and waits for 0F1 of rank 0.",
        ),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_by_name(schedule: Schedule, sentence: str):
    with pytest.raises(PlanError, match=sentence.replace(".", r"\.").replace("(", r"\(")):
        check_schedule(schedule)


def test_too_many_in_flight():
    with pytest.raises(
        PlanError,
        match="Rank 0 of schedule gpipe holds the activations of 8 forwards at a time, and 4 is the bound",
    ):
        check_schedule(make_schedule("gpipe", 4, 8), in_flight=4)


@pytest.mark.parametrize(
    ("settings_", "sentence"),
    [
        (
            ("2f2b", 2, 2),
            "schedule=2f2b is not known. Use one of gpipe, 1f1b, interleaved, zb-h1, zb-v, found.",
        ),
        (("1f1b", 2, 2, 2), "schedule=1f1b has 1 stage on a rank, not virtual_stages=2."),
        (("zb-v", 2, 2, 3), "schedule=zb-v has 2 stages on a rank, not virtual_stages=3."),
        (("gpipe", 2, 0), "it has pp=2, microbatches=0, virtual_stages=1"),
    ],
)
def test_numbers_that_a_schedule_cannot_work_with(settings_: tuple[str, int, int], sentence: str):
    with pytest.raises(PlanError, match=sentence.replace(".", r"\.")):
        make_schedule(*settings_)


@pytest.mark.parametrize("text", ["0X0", "F0", "0F", "", "-1F0", "0F0 "])
def test_actions_read_from_text(text: str):
    if text.strip() == "0F0":
        assert Action.parse(text) == Action(0, "F", 0)
    else:
        with pytest.raises(PlanError, match="is not an action"):
            Action.parse(text)
