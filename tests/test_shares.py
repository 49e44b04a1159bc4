"""Shares that change during a run: what readers read, who may change what, and how ranks come to one
decision."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reading_jobs import Augmented, Stream, job_of

from meshloom.comm.recording import Count
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.errors import JobError, PlanError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.data import measured_shares as pace_file
from meshloom.data.chunks import Chunk
from meshloom.data.job_data import open_reader
from meshloom.data.measured_shares import MIN_STEPS, Pace, remeasure
from meshloom.data.proportion import EVERY_STEPS
from meshloom.data.shares import Shares

MEASURED = Plan(dp=3, microbatches=2, shares="measured")


def read(
    job: Job, plan: Plan, num_steps: int, changes: dict[int, tuple[int, ...]]
) -> tuple[list[list[Chunk]], Shares]:
    """All replicas' chunks of each step. changes: step after whose reading new shares are decided -> these
    shares, from the first free step on."""
    shares = [Shares(plan) for _ in range(plan.dp)]  # of each process
    readers = in_turns(
        [
            partial(open_reader, job, plan, group, 0, num_steps, own)
            for group, own in zip(simulated_groups(plan.dp), shares, strict=True)
        ]
    )
    steps: list[list[Chunk]] = []
    try:
        for step in range(num_steps):
            steps.append(
                [
                    chunk
                    for mine in in_turns([partial(reader.read, step) for reader in readers])
                    for chunk in mine
                ]
            )
            first_free = max(own.first_free for own in shares)
            if step in changes and first_free < num_steps:
                for own in shares:
                    own.change(first_free, changes[step])
        return steps, shares[0]
    finally:
        for reader in readers:
            reader.close()


def sizes_of(steps: list[list[Chunk]], plan: Plan) -> list[list[int]]:
    m = plan.microbatches
    return [
        [sum(chunk.samples for chunk in chunks[start : start + m]) for start in range(0, len(chunks), m)]
        for chunks in steps
    ]


def values_of(steps: list[list[Chunk]]) -> list[list[float]]:
    """Everything that was read, sample after sample."""
    return [
        [value for chunk in chunks if chunk.data is not None for value in chunk.data.flatten().tolist()]
        for chunks in steps
    ]


@pytest.mark.parametrize("data", [Augmented, Stream])
def test_new_shares_hold_from_the_next_step_on_where_nobody_reads_ahead(data: Any) -> None:
    job = job_of(lambda: data(23), batch_size=10)
    steps, shares = read(job, MEASURED, 6, {0: (6, 3, 1), 2: (1, 1, 8)})
    assert sizes_of(steps, MEASURED) == [[4, 4, 2], [6, 3, 1], [2, 1, 0], [1, 1, 8], [1, 1, 8], [0, 0, 3]]
    assert shares.record == [(1, (6, 3, 1)), (3, (1, 1, 8))]
    assert values_of(steps) == values_of(read(job, Plan(), 6, {})[0])  # the same samples with the same draws


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [1, 2])
def test_readers_that_are_ahead_agree_on_the_step_from_which_new_shares_hold(num_workers: int) -> None:
    job = job_of(lambda: Augmented(200), batch_size=10, num_workers=num_workers)
    steps, shares = read(job, MEASURED, 16, {0: (6, 3, 1), 8: (1, 8, 1)})
    assert len(shares.record) == 2 and shares.record[0][0] > 1
    expected = [shares.sizes(step, 10) for step in range(16)]
    assert sizes_of(steps, MEASURED) == expected and [6, 3, 1] in expected and [1, 8, 1] in expected
    assert values_of(steps) == values_of(
        read(job_of(lambda: Augmented(200), batch_size=10), Plan(), 16, {})[0]
    )


def test_a_stream_that_is_split_in_another_process_is_refused() -> None:
    with pytest.raises(JobError, match="num_workers=1 splits batches of an iterable dataset ahead of time"):
        read(job_of(lambda: Stream(9), num_workers=1), MEASURED, 1, {})


def test_what_somebody_has_read_can_no_longer_change() -> None:
    shares = Shares(MEASURED)
    assert shares.first_free == 0 and shares.of(4) == ()
    shares.change(5, (1, 2, 3))
    with pytest.raises(AssertionError, match="those of step 4 were looked up already"):
        shares.change(4, (3, 2, 1))


@given(
    changes=st.dictionaries(
        st.integers(0, 30), st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any), max_size=5
    ),
    num_samples=st.integers(0, 40),
)
@pytest.mark.long
def test_a_record_gives_the_same_shares_again(changes: dict[int, list[int]], num_samples: int) -> None:
    shares = Shares(MEASURED)
    for step, each in sorted(changes.items()):
        shares.change(step, each)
    again = Shares(MEASURED, shares.record)
    for step in range(32):
        latest = max((each for each in changes if each <= step), default=None)
        assert shares.of(step) == again.of(step) == (tuple(changes[latest]) if latest is not None else ())
        assert sum(again.sizes(step, num_samples)) == num_samples


@pytest.mark.parametrize(
    ("plan", "record", "sentence"),
    [
        (MEASURED, [(1, (0, 0, 0))], "are not valid"),
        (MEASURED, [(1, (3, -1, 1))], "are not valid"),
        (MEASURED, [(4, (1, 1, 2)), (4, (1, 2, 1))], "come after those from step 4"),
    ],
)
def test_a_record_of_another_plan_is_refused(plan: Plan, record: Any, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        Shares(plan, record)


# --- Measuring and deciding.


class Clock:
    """Seconds that pass when they are told to."""

    now = 50.0

    def monotonic(self) -> float:
        return self.now


def test_waiting_for_other_replicas_is_not_a_replicas_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(pace_file, "time", clock)
    group: Any = SimpleNamespace(counts={"all_reduce": Count(3, 100, 7.0)})
    pace = Pace([group], SimpleNamespace(type="cpu"))  # type: ignore[arg-type]
    for step, seconds in enumerate((90.0, 4.0, 6.0, 5.0)):  # the first makes things ready
        assert (pace.median() is None) == (step < MIN_STEPS)
        pace.begin()
        clock.now += seconds + 2.5
        group.counts["all_reduce"] += Count(seconds=2.5)
        pace.end(2)
    pace.begin()
    pace.end(0)  # no samples: nothing is learned
    assert pace.median() == pytest.approx((5.0 + 6.0) / 2 / 2)
    pace.forget()
    assert pace.median() is None


class Known:
    """A pace as it was measured."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds

    def median(self) -> float | None:
        return self.seconds

    def forget(self) -> None:
        self.seconds = None


def decide(
    paces: list[float | None], asked: list[int], stop_step: int = 100, tp: int = 1
) -> tuple[list[str], list[Shares], list[Known]]:
    """On ranks of three replicas, in lockstep, for batches of 13. asked: the last step that each has read."""
    known = [Known(each) for each in paces]
    shares = [Shares(MEASURED) for _ in paces]
    for own, last in zip(shares, asked, strict=True):
        own.of(last)
    return decide_again(shares, known, stop_step, tp), shares, known


def decide_again(shares: list[Shares], known: list[Known], stop_step: int = 100, tp: int = 1) -> list[str]:
    """What each rank would tell the user."""
    contexts: Any = [
        SimpleNamespace(rank=group.rank, world=group, place=SimpleNamespace(dp=group.rank // tp))
        for group in simulated_groups(len(known))
    ]
    paces: Any = zip(contexts, known, shares, strict=True)
    return in_turns([partial(remeasure, context, pace, own, 13, stop_step) for context, pace, own in paces])


def test_all_ranks_note_what_rank_0_decided_for_a_step_that_nobody_has_read() -> None:
    texts, shares, known = decide([1.0, 1.0, 4.0], [20, 23, 21])
    assert texts == ["shares 6+6+1 from step 24: replica 2 takes 4.0x as long per sample as replica 0"] * 3
    assert [own.record for own in shares] == [[(24, (6, 6, 1))]] * 3
    assert all(each.seconds is None for each in known)  # what was measured is used up


def test_a_replica_is_as_slow_as_its_slowest_rank() -> None:
    texts, shares, _ = decide([1.0, 1.0, 0.1, 3.0, 1.0, 0.5], [9, -1, 9, -1, 9, -1], tp=2)
    assert shares[5].record == [(10, (6, 2, 5))] or shares[5].record == [(10, (5, 2, 6))]
    assert "replica 1 takes 3.0x as long per sample as replica 0" in texts[0]


@pytest.mark.parametrize(
    ("paces", "asked", "stop_step"),
    [
        ([1.0, 1.0, None], [9, 9, 9], 100),  # one has not been measured
        ([1.0, 1.02, 0.99], [9, 9, 9], 100),  # nothing to gain
        ([1.0, 1.0, 4.0], [9, 49, 9], 50),  # one has read all there is
    ],
)
def test_shares_stay_where_a_change_is_not_possible_or_does_not_pay(
    paces: Any, asked: list[int], stop_step: int
) -> None:
    texts, shares, _ = decide(paces, asked, stop_step)
    assert texts == ["", "", ""] and not any(own.record for own in shares)


@settings(max_examples=30, deadline=None)
@given(paces=st.lists(st.floats(0.01, 10), min_size=3, max_size=3))
def test_having_decided_once_nothing_changes_as_long_as_speeds_do_not(paces: list[float]) -> None:
    _, shares, known = decide([*paces], [9, 9, 9])
    first = shares[0].record
    for own, pace, seconds in zip(shares, known, paces, strict=True):
        own.of(9 + EVERY_STEPS)
        pace.seconds = seconds
    assert decide_again(shares, known) == ["", "", ""]
    assert all(own.record == first for own in shares)
