"""What a rank writes of what it is doing is what another process reads."""

from __future__ import annotations

import mmap
import tempfile
import time

import pytest

from meshloom.comm.liveness.activity import (
    PAGE_BYTES,
    PHASES,
    WARM_UP_STEPS,
    Activity,
    is_page,
    new_page,
    read,
)
from meshloom.pipeline.schedules.schedule import Action

STEP = [Action.parse(text) for text in ["1F0", "1F1", "1B0", "1B1"]]


def run_step(activity: Activity, step: int) -> None:
    activity.enter("preparing", step)
    activity.follow(STEP)
    for action in STEP:
        activity.waits()
        activity.goes_on()
        activity.began(action)
        activity.ended(action)


def test_an_action_is_told_with_what_comes_next():
    activity, told = Activity(), list[str]()
    activity.enter("preparing", 12)
    told.append(str(activity.now()))
    activity.follow(STEP)
    activity.waits()
    told.append(str(activity.now()))
    activity.goes_on()
    activity.began(STEP[0])
    told.append(str(activity.now()))
    activity.waits()
    told.append(str(activity.now()))
    activity.goes_on()
    activity.ended(STEP[0])
    told.append(str(activity.now()))
    assert told == [
        "preparing step 12",
        "waiting before 1F0 of step 12 (stage 1, forward of microbatch 0)",
        "computing 1F0 of step 12 (stage 1, forward of microbatch 0)",
        "computing 1F0 of step 12 (stage 1, forward of microbatch 0), waiting for another rank",
        "about to go on before 1F1 of step 12 (stage 1, forward of microbatch 1)",
    ]


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase not in ("before", "computing")])
def test_every_phase_has_words(phase: str):
    activity = Activity()
    activity.enter(phase, 1)  # type: ignore[arg-type]
    text = str(activity.now())
    assert text and (phase in ("starting", "joining", "own code", "setting up") or "1" in text)


def test_an_actions_longest_time_is_known_after_the_first_steps():
    activity = Activity()
    for step in range(WARM_UP_STEPS):
        run_step(activity, step)
        activity.follow(STEP)
        activity._runs -= 1  # pyright: ignore[reportPrivateUsage]  (only to look)
        assert activity.now().longest_seconds == 0.0
    activity.follow(STEP)
    activity.began(STEP[0])
    began = time.monotonic()
    while time.monotonic() < began + 0.01:
        pass
    activity.ended(STEP[0])
    assert 0.01 <= activity.now().longest_seconds < 1.0  # 1F1 is of the same kind
    activity.ended(STEP[1])
    assert activity.now().longest_seconds == 0.0  # nothing is known of 1B


def test_another_process_reads_what_is_written_and_a_new_page_says_starting():
    with tempfile.TemporaryFile() as file:
        file.write(new_page())
        file.flush()
        here, there = (
            memoryview(mmap.mmap(file.fileno(), PAGE_BYTES)),
            memoryview(mmap.mmap(file.fileno(), PAGE_BYTES)),
        )
    assert is_page(here) and not is_page(memoryview(bytearray(PAGE_BYTES)))
    assert str(read(here)) == "starting"
    activity = Activity(there)
    activity.enter("saving", 3)
    assert str(read(here)) == "saving after 3 steps"
    activity.waits()
    snapshot = read(here)
    assert snapshot and snapshot.waits and snapshot.since <= snapshot.moved <= time.monotonic()


def test_telling_costs_microseconds():
    activity = Activity()
    seconds = min(_seconds_of_a_step(activity) for _ in range(20))
    assert seconds / len(STEP) < 50e-6  # about 3 on an idle machine; four notes each


def _seconds_of_a_step(activity: Activity) -> float:
    began = time.perf_counter()
    run_step(activity, 0)
    return time.perf_counter() - began
