"""Idle shares are the formulas' on paper and what one counts by hand otherwise; what a run recorded is read
back and reported."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshloom.cli.main import main
from meshloom.comm.group import Group
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.errors import ReportError
from meshloom.core.mesh import Mesh, MeshCoordinates
from meshloom.core.schedules import SCHEDULES
from meshloom.pipeline.runtime.recorder import gather_timeline
from meshloom.pipeline.schedules.builders import make_schedule
from meshloom.pipeline.schedules.schedule import Action, Schedule
from meshloom.pipeline.schedules.spans import Span
from meshloom.pipeline.schedules.timing import Durations
from meshloom.report.picture import save_picture
from meshloom.telemetry.timeline import Timeline, TimelineRow, idle_of, on_paper
from meshloom.telemetry.timeline_files import FILE, Recording, read_recording, write_recording
from tests.covering import few
from tests.fitted import fitted
from tests.jobs import make_job, vectors

FILE_OF_A_JOB = str(Path(__file__).with_name("job_file.py"))


def alike(name: str, p: int, m: int, v: int | None = None) -> Timeline:
    schedule = make_schedule(name, p, m, v)
    return on_paper(schedule, Durations.uniform(schedule.num_stages).of)


@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize("m", few([3, 1, 8, 16], 2))
def test_idle_shares_on_paper_are_the_formulas(p: int, m: int):
    """Narayanan et al. (2021), section 2.2: (p - 1) / m of the busy time, over v; Qi et al. (2024): (p - 1)
    (F + B - W)."""
    for name in ("gpipe", "1f1b"):
        for idle in idle_of(alike(name, p, m)):
            assert idle.measured == idle.formula == pytest.approx((p - 1) / (m + p - 1))
    if m % p == 0:
        for idle in idle_of(alike("interleaved", p, m, 3)):
            assert idle.formula == pytest.approx((p - 1) / (3 * m + p - 1))
    if m >= 2 * p - 1:
        for idle in idle_of(alike("zb-h1", p, m)):
            assert idle.formula == pytest.approx((p - 1) / (3 * m + p - 1))


def span(text: str, start: float, stop: float) -> Span:
    action = Action.parse(text)
    return Span(kind=action.kind, stage=action.stage, microbatch=action.microbatch, start=start, stop=stop)


def by_hand(dp: int = 0) -> tuple[TimelineRow, TimelineRow]:
    """Two ranks, two microbatches: 20 s from the first forward's start (2) to the last backward's end
    (22)."""
    first = TimelineRow(rank=dp, place=MeshCoordinates(dp=dp), spans=(
        Span(kind="wait", start=0.0, stop=2.0), span("0F0", 2, 4), span("0F1", 4, 6), span("0B0", 11, 15), Span(kind="recompute", start=12.0, stop=13.0),
        span("0B1", 18, 22), Span(kind="exchange", start=22.0, stop=30.0), Span(kind="update", start=30.0, stop=31.0),
    ))  # fmt: skip
    second = TimelineRow(
        rank=2 + dp,
        place=MeshCoordinates(dp=dp, pp=1),
        spans=(span("1F0", 5, 7), span("1B0", 7, 10), span("1F1", 11, 13), span("1B1", 13, 17)),
    )
    return first, second


def timeline_by_hand() -> Timeline:
    return Timeline(step=4, schedule=make_schedule("1f1b", 2, 2), rows=by_hand(), clock_error_seconds=0.25)


def test_idle_seconds_counted_by_hand():
    timeline = timeline_by_hand()
    first, second = timeline.rows
    assert (timeline.start, timeline.seconds, timeline.stop) == (2.0, 20.0, 31.0)
    # 2 + 2 + 4 + 4 and 2 + 3 + 2 + 4 of 20 are busy
    assert (timeline.idle_seconds(first), timeline.idle_seconds(second)) == (8.0, 9.0)
    assert timeline.idle_share(first) == 0.4
    # On paper with 2, 4 on stage 0 and 2, 3.5 on stage 1: 0F0 ends at 2, 1F0 at 4, 1B0 at 7.5, 0B0 at 11.5;
    # 1F1 at 9.5, 1B1 at 13, 0B1 at 17.
    idle = idle_of(timeline)
    assert [each.own_seconds for each in idle] == pytest.approx([5 / 17, 6 / 17])
    assert [each.formula for each in idle] == pytest.approx([1 / 3, 1 / 3])


def test_pipelines_beside_each_other_have_their_own_time():
    late = [
        replace(
            row,
            spans=tuple(replace(each, start=each.start + 100, stop=each.stop + 100) for each in row.spans),
        )
        for row in by_hand(dp=1)
    ]
    timeline = Timeline(step=1, schedule=make_schedule("1f1b", 2, 2), rows=(*by_hand(), *late))
    assert [timeline.idle_seconds(row) for row in timeline.rows] == [8.0, 9.0, 8.0, 9.0]
    assert timeline.seconds == 20.0 and timeline.stop == 131.0


def test_a_pipeline_may_have_fewer_microbatches_than_another_or_none():
    fewer = [
        replace(row, spans=tuple(each for each in row.spans if each.microbatch in (None, 0)))
        for row in by_hand(dp=1)
    ]
    none = [replace(row, rank=row.rank + 4, place=replace(row.place, dp=2), spans=()) for row in by_hand()]
    timeline = Timeline(step=1, schedule=make_schedule("1f1b", 2, 2), rows=(*by_hand(), *fewer, *none))
    # 2 to 15 of the second pipeline, in which 2 + 4 and 2 + 3 seconds are busy
    assert [timeline.idle_seconds(row) for row in timeline.rows] == [8.0, 9.0, 7.0, 8.0, 0.0, 0.0]
    idle = idle_of(timeline)
    assert idle[2].own_seconds == pytest.approx(5 / 11) and idle[4].own_seconds == 0.0  # 2, 2, 3, 4 in a row
    assert Timeline.from_dict(timeline.to_dict()) == timeline


def test_a_timeline_is_of_its_schedule():
    rows, schedule = by_hand(), make_schedule("1f1b", 2, 2)
    shorter = replace(rows[1], spans=rows[1].spans[:-1])
    swapped = replace(rows[1], spans=(rows[1].spans[0], rows[1].spans[2], *rows[1].spans[1::2]))
    for wrong, sentence in (
        (
            (rows[0], shorter),
            r"Action 3 of rank 2 \(dp=0,pp=1\) is nothing, and schedule 1f1b has 1B1 there.",
        ),
        ((rows[0], swapped), r"Action 1 of rank 2 \(dp=0,pp=1\) is 1F1, and schedule 1f1b has 1B0 there."),
        ((replace(rows[0], place=MeshCoordinates(pp=2)),), "has no part in schedule 1f1b over 2 ranks"),
        ((), "has a row for every rank"),
    ):
        with pytest.raises(ReportError, match=sentence):
            Timeline(step=1, schedule=schedule, rows=wrong)


@given(
    name=st.sampled_from(list(SCHEDULES)), p=st.integers(1, 4), m=st.integers(1, 6),
    costs=st.lists(st.floats(1e-6, 10.0), min_size=8, max_size=8),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
@pytest.mark.long
def test_any_timeline_survives_json(name: str, p: int, m: int, costs: list[float]):
    schedule = make_schedule(name, p, m)
    timeline = on_paper(schedule, lambda action: costs[(action.stage + 3 * action.microbatch) % 8])
    assert Timeline.from_dict(json.loads(json.dumps(timeline.to_dict()))) == timeline
    for row, idle in zip(timeline.rows, idle_of(timeline), strict=True):
        assert all(0.0 <= share < 1.0 for share in (idle.measured, idle.formula, idle.own_seconds))
        assert timeline.idle_seconds(row) == pytest.approx(
            timeline.seconds - sum(each.stop - each.start for each in row.spans), abs=1e-9
        )


def test_gathered_rows_begin_with_the_first_forward():
    """Ranks of dp=2,pp=2, each with what it noted on a clock that it shares with the others, as in one
    process."""
    mesh, schedule = Mesh(dp=2, pp=2), make_schedule("1f1b", 2, 2)
    noted = [row.spans for row in sorted((*by_hand(), *by_hand(dp=1)), key=lambda row: row.rank)]

    def gathered(group: Group) -> Timeline:
        return gather_timeline(
            group, noted[group.rank], step=2, place=mesh.place(group.rank), schedule=lambda _: schedule
        )

    found = in_turns([partial(gathered, group) for group in simulated_groups(4)])
    assert all(each == found[0] for each in found)
    assert [row.place for row in found[0].rows] == [mesh.place(rank) for rank in range(4)]
    assert found[0].start == 0.0 and found[0].rows[0].spans[0] == Span(kind="wait", start=-2.0, stop=0.0)
    assert found[0].rows[2].spans[0] == span("1F0", 3, 5)


def test_a_recording_is_written_and_read(tmp_path: Path):
    steps = tuple(replace(timeline_by_hand(), step=step) for step in (1, 2, 9))
    recording = Recording(plan="dp=1,pp=2,microbatches=2", timelines=steps)
    assert write_recording(tmp_path / "run", recording) == tmp_path / "run" / FILE
    assert read_recording(tmp_path / "run") == recording
    assert [path.name for path in (tmp_path / "run").iterdir()] == [FILE]
    assert recording.timeline().step == 9 and recording.timeline(2).step == 2
    with pytest.raises(ReportError, match=r"no timeline of step 4. There is one of step 1, 2 and 9."):
        recording.timeline(4)
    with pytest.raises(ReportError, match="one step or more"):
        Recording(plan="dp=1", timelines=())


def _damaged(change: str, path: Path) -> None:
    values: Any = {"version": 1, "plan": "dp=1,pp=2", "steps": [timeline_by_hand().to_dict()]}
    text = json.dumps(values)
    if change == "cut":
        text = text[:-30]
    elif change == "version":
        text = text.replace('"version": 1', '"version": 7')
    elif change == "no schedule":
        text = text.replace('"schedule"', '"list"')
    elif change == "another action":
        text = text.replace('["B", 1, 0', '["B", 1, 1')
    elif change == "short span":
        text = text.replace('["B", 1, 0,', '["B", 1,')
    elif change == "list":
        text = "[1, 2]"
    path.write_text(text)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("cut", "timeline.json cannot be read: "),
        ("version", "version 7 of the format, and this meshloom reads version 1"),
        ("no schedule", "holds no timeline as meshloom writes it"),
        ("another action", "is 1B1, and schedule 1f1b has 1B0 there"),
        ("short span", "holds no timeline as meshloom writes it"),
        ("list", "is no timeline as meshloom writes it"),
    ],
)
def test_a_damaged_file_is_said(tmp_path: Path, change: str, sentence: str):
    _damaged(change, tmp_path / FILE)
    with pytest.raises(ReportError, match=sentence):
        read_recording(tmp_path)


@pytest.fixture(scope="module", autouse=True)
def _open_fonts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """matplotlib opens a font when it first writes with it, and keeps it."""
    if find_spec("matplotlib") is not None:
        save_picture(alike("gpipe", 1, 1), tmp_path_factory.mktemp("fonts") / "x.png")


# --- the command line


@pytest.fixture
def run(tmp_path: Path) -> Path:
    steps = tuple(replace(timeline_by_hand(), step=step) for step in (1, 2, 9))
    write_recording(tmp_path / "run", Recording(plan="dp=1,pp=2,microbatches=2", timelines=steps))
    return tmp_path / "run"


def test_report_draws_the_newest_step_in_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]):
    for words in (["--timeline"], ["--timeline", "-"], ["--step", "9"]):
        assert main(["report", str(run), *words]) == 0
        text = capsys.readouterr().out
        assert text.startswith(
            "step 9 of dp=1,pp=2,microbatches=2: 1f1b, 2 stages on 2 ranks, 2 microbatches; 20 s from"
        )
        assert re.search(r"rank 0 \(dp=0\) .* 40\.0%    33\.3%    29\.4%\n", text)
    assert main(["report", str(run), "--step", "2"]) == 0
    assert capsys.readouterr().out.startswith("step 2 of")


@pytest.mark.long
def test_the_ending_decides_what_is_written(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    begins = {"svg": b"<?xml", "png": b"\x89PNG\r\n", "json": b'{"traceEvents"', "PNG": b"\x89PNG\r\n"}
    for ending, start in begins.items():
        assert main(["report", str(run), "--timeline", str(tmp_path / f"step.{ending}")]) == 0
        assert (tmp_path / f"step.{ending}").read_bytes().startswith(start)
        assert f"step 9 written to {tmp_path}/step.{ending}" in capsys.readouterr().out


def test_report_says_what_a_run_has_left(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["report", str(run), "--json", str(tmp_path / "lines")]) == 0
    text = capsys.readouterr().out.splitlines()
    assert text[0] == f"{run}: plan dp=1,pp=2,microbatches=2, step 9"
    assert text[1:3] == [
        "checkpoints: none",
        "timeline of step 1: 1f1b, idle 42.5% of the time, formula 33.3%",
    ]
    records = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert [each["event"] for each in records] == ["run", *["idle"] * 6]
    assert records[-1] == {
        "event": "idle",
        "step": 9,
        "rank": 2,
        "measured": 0.45,
        "formula": pytest.approx(1 / 3),
        "own_seconds": pytest.approx(6 / 17),
    }


@pytest.mark.long
def test_report_of_a_run_without_pipeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    import sys

    monkeypatch.setattr(sys, "path", list(sys.path))
    assert (
        main(["train", FILE_OF_A_JOB, "--plan", "dp=2", "--devices", "simulated", "--out", str(tmp_path)])
        == 0
    )
    capsys.readouterr()
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}: plan dp=2, step 4",
        f"checkpoint of step 2: {tmp_path}/step-00000002",
        f"checkpoint of step 4: {tmp_path}/step-00000004",
        "timelines: none (a run with pp=2 or more records them)",
    ]
    (tmp_path / "step-00000004" / "meta.json").write_text("{}")
    assert main(["report", str(tmp_path)]) == 0
    assert f"damaged: {tmp_path}/step-00000004" in capsys.readouterr().out
    assert main(["report", str(tmp_path), "--timeline"]) == 2
    assert (
        f"{tmp_path} has no timeline.json: no timeline was recorded. A run with several stages records one"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "There is no directory nowhere. Give the one that the run was given as --out."),
        (
            ["nowhere", "--timeline"],
            "There is no directory nowhere. Give the one that the run was given as --out.",
        ),
        (
            ["RUN", "--timeline", "step.pdf"],
            "--timeline step.pdf ends in none of .svg, .png, .json. Give one of these, or - for the terminal.",
        ),
        (
            ["RUN", "--timeline", "/nowhere/step.svg"],
            "/nowhere/step.svg cannot be written: No such file or directory.",
        ),
        (
            ["RUN", "--timeline", "/nowhere/step.json"],
            "/nowhere/step.json cannot be written: No such file or directory.",
        ),
        (["RUN", "--step", "4"], "There is no timeline of step 4. There is one of step 1, 2 and 9."),
    ],
)
def test_a_wrong_request_is_one_sentence_and_2(
    run: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
):
    if "/nowhere/step.svg" in words:
        pytest.importorskip("matplotlib")
    assert main(["report", *(str(run) if word == "RUN" else word for word in words)]) == 2
    assert sentence in capsys.readouterr().err


def test_without_matplotlib_the_way_out_is_said(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(run), "--timeline", str(tmp_path / "step.svg")]) == 2
    assert "which is not installed: pip install matplotlib" in capsys.readouterr().err
    assert main(["report", str(run), "--timeline", str(tmp_path / "step.json")]) == 0  # needs none


def test_schedules_travel_as_text():
    schedule = make_schedule("zb-v", 2, 3)
    assert Schedule.parse(alike("zb-v", 2, 3).to_dict()["schedule"]) == schedule


@pytest.mark.parametrize("schedule", [*SCHEDULES])
@pytest.mark.slow
def test_the_timeline_of_a_step_with_a_short_batch_is_kept(tmp_path: Path, schedule: str):
    """Its last batch gave one replica fewer microbatches than the plan has, whose order is not always that of the
    first ones, and the run ended with an error before its last checkpoint."""
    job, out = make_job("mlp", "sgd", steps=2, data=lambda: vectors(18)), tmp_path / "run"
    plan = f"dp=2,pp=2,schedule={schedule},microbatches=4"
    fitted(job, plan, out=out)
    short = read_recording(out).timelines[-1]
    assert short.step == 2 and sorted(each.num_microbatches for each in short.pipelines.values()) == [2, 4]
    assert len(idle_of(short)) == 4 and all(0.0 <= each.own_seconds < 1.0 for each in idle_of(short))
    assert main(["report", str(out), "--timeline", str(tmp_path / "step.json")]) == 0
    arrows = [
        each for each in json.loads((tmp_path / "step.json").read_text())["traceEvents"] if each["ph"] == "s"
    ]
    # forwards and backwards of 4 and 2 microbatches, over every border between ranks
    borders = sum(one != other for one, other in pairwise(short.schedule.ranks))
    assert len(arrows) == 2 * 6 * borders
    assert any(path.name.startswith("step-") for path in out.iterdir())


def test_a_pipeline_with_fewer_microbatches_does_each_action_once_in_an_order_that_can_be():
    fewer = [
        replace(row, spans=tuple(each for each in row.spans if each.microbatch == 0)) for row in by_hand(dp=1)
    ]
    backwards = replace(
        fewer[0],
        spans=(replace(fewer[0].spans[1], start=1, stop=2), replace(fewer[0].spans[0], start=3, stop=4)),
    )
    for wrong, sentence in (
        (
            replace(fewer[0], spans=fewer[0].spans[:1]),
            "Pipeline dp=1,tp=0: Stage 0 .* has F for microbatch 0",
        ),
        (backwards, "Pipeline dp=1,tp=0: 0B0 comes before 0F0 on rank 0"),
    ):
        with pytest.raises(ReportError, match=sentence):
            Timeline(step=1, schedule=make_schedule("1f1b", 2, 2), rows=(*by_hand(), wrong, fewer[1]))
