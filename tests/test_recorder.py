"""What a rank's recorder notes is what ran, when it ran, at little cost."""

from __future__ import annotations

import time
from datetime import timedelta
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks

from meshloom.comm.simulated import simulated_groups
from meshloom.comm.torch.c10d import C10dGroup
from meshloom.comm.turns import in_turns
from meshloom.core.errors import ReportError
from meshloom.pipeline.runtime.recorder import Recorder
from meshloom.pipeline.schedules.builders import make_schedule
from meshloom.pipeline.schedules.schedule import Action
from meshloom.pipeline.schedules.spans import Span
from meshloom.telemetry.timeline import Timeline, TimelineRow, idle_of
from tests.stub_stages import record_step, stub_run

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_a_pipeline_on_simulated_ranks_is_noted_as_its_schedule(name: str):
    schedule = make_schedule(name, 3, 4)
    groups = simulated_groups(3)
    found = in_turns(
        [lambda group=group: record_step(schedule, group, stub_run(schedule, group, {})) for group in groups]
    )
    timeline = found[0]
    assert all(each == timeline for each in found)
    assert timeline.clock_error_seconds < 0.1
    expected = str(schedule).splitlines()[1:]
    for row, line in zip(timeline.rows, expected, strict=True):
        assert f"rank {row.rank}: " + " ".join(span.name for span in row.spans if span.kind in "FBIW") == line
        assert [span.kind for span in row.spans[-2:]] == ["exchange", "update"]
        for before, after in pairwise(row.spans):
            assert before.stop <= after.start
            if after.action:  # what is before an action is another, or the wait for it
                assert before.stop == pytest.approx(after.start, abs=1e-8)
        assert timeline.idle_seconds(row) + row.busy_seconds == pytest.approx(timeline.seconds, abs=1e-6)
    assert timeline.rows[0].actions[0].start == 0.0


def test_spans_within_actions_and_waits_between_them():
    recorder = Recorder(CPU)
    first, second = Action(0, "F", 0), Action(0, "B", 0)
    recorder.began(first)
    recorder.ended(first)
    recorder.began(second)
    with recorder.span("recompute", 0, 0):
        time.sleep(0.002)
    recorder.ended(second)
    recorder.began(Action(0, "F", 1))  # never ends: not known
    spans = recorder.take()
    assert [span.name for span in spans] == ["wait", "0F0", "wait", "0B0", "recompute", "wait"]
    backward, recompute = spans[3], spans[4]
    assert backward.start <= recompute.start < recompute.stop <= backward.stop
    assert 0.002 <= recompute.seconds <= backward.seconds
    assert (spans[2].start, spans[2].stop) == (spans[1].stop, backward.start)
    assert recorder.take() == ()


def test_a_new_step_forgets_the_one_before():
    recorder = Recorder(CPU)
    recorder.began(Action(0, "F", 0))
    recorder.ended(Action(0, "F", 0))
    recorder.begin()
    with recorder.span("update"):
        pass
    assert [span.kind for span in recorder.take()] == ["update"]


def test_a_span_that_raises_ends():
    recorder = Recorder(CPU)
    with pytest.raises(KeyError), recorder.span("exchange"):
        raise KeyError
    assert [span.kind for span in recorder.take()] == ["exchange"]


def test_a_note_costs_less_than_a_microsecond():
    recorder, action = Recorder(CPU), Action(0, "F", 0)
    best = float("inf")
    for _ in range(50):  # the best of many short times is what it takes when nothing else runs
        recorder.begin()
        started = time.perf_counter()
        for _ in range(200):
            recorder.began(action)
            recorder.ended(action)
        best = min(best, (time.perf_counter() - started) / 400)
    assert best < 1e-6, f"{best * 1e9:.0f} ns"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"kind": "X", "start": 0.0, "stop": 1.0}, "kind 'X' is not known"),
        ({"kind": "update", "start": 2.0, "stop": 1.0}, "cannot stop at 1.0 s when it starts at 2.0 s"),
        (
            {"kind": "F", "start": 0.0, "stop": 1.0},
            "belongs to a stage and a microbatch, and has None and None",
        ),
    ],
)
def test_spans_that_cannot_be(values, sentence: str):  # type: ignore[no-untyped-def]
    with pytest.raises(ReportError, match=sentence):
        Span(**values)


@pytest.mark.slow
@pytest.mark.processes
def test_processes_idle_as_the_formula_says():
    """Stages that sleep, so that the processes need no core each; what is sent arrives after it was made, on
    one clock."""
    text = on_ranks(_sleepy, 3)[0]
    timeline = Timeline.from_dict(text)
    for row, idle in zip(timeline.rows, idle_of(timeline), strict=True):
        assert idle.formula == pytest.approx(2 / 8)
        assert idle.own_seconds == pytest.approx(2 / 8, abs=0.05)
        assert idle.measured == pytest.approx(2 / 8, abs=0.12), row.name  # messages and a busy machine
    ends = {span.action: span for row in timeline.rows for span in row.actions}
    for number in range(6):
        for stage in (1, 2):
            assert (
                ends[Action(stage, "F", number)].start
                >= ends[Action(stage - 1, "F", number)].stop - timeline.clock_error_seconds
            )
            assert (
                ends[Action(stage - 1, "B", number)].start
                >= ends[Action(stage, "B", number)].stop - timeline.clock_error_seconds
            )


def _sleepy() -> object:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    process_group = dist.new_group(list(range(dist.get_world_size())), backend="gloo")
    assert isinstance(process_group, dist.ProcessGroup)
    group = C10dGroup(process_group, [f"rank {rank}" for rank in range(dist.get_world_size())])
    schedule = make_schedule("1f1b", 3, 6)
    run = stub_run(schedule, group, {"F": 0.015, "B": 0.03})
    timelines = [_twice(schedule, group, run)]
    return timelines[0].to_dict()


def _twice(schedule, group, run):  # type: ignore[no-untyped-def]
    """The first step connects the ranks."""
    record_step(schedule, group, run)
    return record_step(schedule, group, run, 2)


def test_rows_have_names():
    from meshloom.core.mesh import MeshCoordinates

    assert TimelineRow(rank=3, place=MeshCoordinates(dp=1, pp=1), spans=()).name == "rank 3 (dp=1,pp=1)"
