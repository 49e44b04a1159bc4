"""The log of a run in its directory, the page that is made of it, and watching it from elsewhere."""

from __future__ import annotations

import json
import re
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from jobs import make_job

from meshloom.cli import verb_watch
from meshloom.cli.main import main
from meshloom.core.errors import ReportError
from meshloom.report.page.division_tree import division_tree
from meshloom.report.page.history import read_history
from meshloom.report.page.page import page
from meshloom.telemetry.progress import QUIET, Progress
from meshloom.telemetry.run_log import FILE, RunLog, read_events
from tests.fitted import fitted


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps, and two more of a run that resumed it."""
    out = tmp_path_factory.mktemp("runs") / "first"
    for steps in (3, 5):
        resume = out if steps == 5 else None
        fitted(make_job("mlp", "sgd"), "dp=2", steps=steps, out=out, resume=resume, listener=QUIET)
    return out


class Tags(HTMLParser):
    """void: tags without an end. found: name and attributes of each tag."""

    VOID = frozenset({"meta", "link"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.long
def test_a_run_keeps_a_log_and_one_that_resumes_adds_to_it(run: Path) -> None:
    events = read_events(run)
    assert [each["step"] for each in events if each["event"] == "step"] == [1, 2, 3, 4, 5]
    assert [each["event"] for each in events].count("start") == 2
    history = read_history(run)
    assert history.start["plan"] == "dp=2"
    assert history.start["step"] == 3
    assert [step for step, _ in history.steps["loss"]] == [1, 2, 3, 4, 5]
    assert history.end["last_loss"] == history.steps["loss"][-1][1]
    assert [step for step, _ in history.checkpoints] == [3, 5]
    assert history.memory["parameters"] == 4 * history.division["parameters"]


def test_of_a_step_that_was_done_twice_the_newer_record_counts(tmp_path: Path) -> None:
    log = RunLog(tmp_path, goes_on=False)
    log.write("note", text="before the start")
    log.start(plan="dp=1")
    for step, loss in ((1, 4.0), (2, 3.0), (3, float("nan"))):
        log.listener().step(progress(step, loss))
    log.close()
    again = RunLog(tmp_path, goes_on=True)
    again.start(plan="dp=1")
    again.listener().step(progress(2, 2.5))
    again.close()
    history = read_history(tmp_path)
    assert history.steps["loss"] == [(1, 4.0), (2, 2.5)]  # a loss that is not finite is no point
    assert "learning_rate.1" not in history.steps  # it is the other group's
    assert history.notes == ["before the start"]


def progress(step: int, loss: float) -> Progress:
    return Progress(
        step=step, steps=3, loss=loss, gradient_norm=None, learning_rates=[0.1, 0.1], samples_per_second=1.0,
        tokens_per_second=None, seconds_left=0.0, memory_bytes=1,
    )  # fmt: skip


def test_a_run_that_begins_anew_forgets_what_was_there(tmp_path: Path) -> None:
    for plan in ("dp=2", "dp=3"):
        log = RunLog(tmp_path, goes_on=False)
        log.start(plan=plan)
        log.close()
    assert [each["plan"] for each in read_events(tmp_path)] == ["dp=3"]


def test_a_refused_run_leaves_no_log(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "new", goes_on=False)
    log.write("note", text="before it is refused")
    log.close()
    assert not (tmp_path / "new").exists()


def test_the_line_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"event": "start"}\n{"event": "st')
    assert read_events(tmp_path) == [{"event": "start"}]
    (tmp_path / FILE).write_text("no record\n")
    with pytest.raises(ReportError, match="Line 1 of .* is no JSON record: b'no record'"):
        read_events(tmp_path)


# --- The page.


@pytest.mark.long
def test_the_page_is_well_formed_and_needs_no_network(run: Path) -> None:
    pytest.importorskip("plotly")
    text = page([read_history(run)])
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    for _, attributes in tags.found:
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))
    targets = {attributes["id"] for _, attributes in tags.found if "id" in attributes}
    assert all(each["href"][1:] in targets for tag, each in tags.found if tag == "a" and each["href"])
    charts = [each for _, each in tags.found if each.get("class") == "chart"]
    assert charts and all(each["aria-label"] for each in charts)


def test_the_page_shows_what_was_measured(run: Path) -> None:
    pytest.importorskip("plotly")
    history = read_history(run)
    history.notes.append("a <b>note</b> & more")
    text = page([history])
    [values] = re.findall(r"id='c0-values'>(.*?)</script>", text)
    line = json.loads(values)["data"][0]
    assert list(zip(line["x"], line["y"], strict=True)) == history.steps["loss"]
    assert "a &lt;b&gt;note&lt;/b&gt; &amp; more" in text
    for name in ("dp all_reduce", "moving data between ranks", "optimizer"):
        assert name in text


def test_an_asynchronous_run_shows_its_updates(tmp_path: Path) -> None:
    summary = fitted(make_job("mlp", "sgd"), "dp=2,exchange=async", steps=6, out=tmp_path, listener=QUIET)
    history = read_history(tmp_path)
    assert history.end["last_loss"] == summary.last_loss
    assert [step for step, _ in history.steps["age"]] == [1, 2, 3, 4, 5, 6]
    pytest.importorskip("plotly")
    assert "Age of gradients in updates" in page([history])


@pytest.mark.long
def test_a_page_of_a_hundred_thousand_steps_stays_small(run: Path) -> None:
    pytest.importorskip("plotly")
    history = read_history(run)
    for name in history.steps:
        history.steps[name] = [(step, 1.0 / step) for step in range(1, 100_001)]
    history.steps["loss"][50_000] = (50_001, 77.0)  # a single peak is not thinned away
    text = page([history])
    assert len(text) < 10_000_000
    assert "77.0" in text


def test_two_runs_side_by_side_and_the_runners_up(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):  # fmt: skip
    pytest.importorskip("plotly")
    plan: dict[str, Any] = {"event": "plan", "step_seconds": 0.1, "measured_seconds": None, "memory_bytes": 100, "fits": True, "why": "it is fast"}  # fmt: skip
    plans = tmp_path / "plans.json"
    plans.write_text("".join(json.dumps({**plan, "plan": each}) + "\n" for each in ("tp=2", "dp=2")))
    file = tmp_path / "page.html"
    words = ["report", str(run), "--html", str(file), "--beside", str(run), "--plans", str(plans)]
    assert main(words) == 0
    assert str(file) in capsys.readouterr().out
    text = file.read_text()
    assert "Runs</h2>" in text
    marked = re.findall(r"<tr class=marked><td>([^<]*)", text)
    assert [each.split()[0] for each in marked] == ["dp=2"]


def test_what_cannot_be_shown_is_said(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly")
    page_file = str(tmp_path / "page.html")
    for words, sentence in (
        ([str(tmp_path), "--html", page_file], f"{tmp_path} has no events.jsonl"),
        ([str(tmp_path / "no"), "--html", page_file], "There is no directory"),
        (
            [str(run), "--html", str(tmp_path / "no/page.html")],
            "cannot be written: No such file or directory",
        ),
        ([str(run), "--beside", str(run)], "--beside is shown in a page. Give --html FILE, too."),
        ([str(run), "--html", page_file, "--plans", str(run / FILE)], "The plans' file has no plan in it"),
    ):
        assert main(["report", *words]) == 2
        assert sentence in " ".join(capsys.readouterr().err.split())


def test_the_tree_says_who_holds_what() -> None:
    rows = [
        {"name": "embed.weight", "shape": [6, 4], "parts": [[3, 4], [3, 4]], "stages": [0, 1]},
        {"name": "blocks.0.bias", "shape": [5], "stages": [1]},
    ]
    text = re.sub(r"<[^>]*>", " ", division_tree({"model": "Net", "parameters": 29, "rows": rows}))
    words = " ".join(text.split())
    assert "Net 29 parameters, 100.0%, 83% divided along tp, rank 0, 1 along pp" in words
    assert "weight 6 x 4, divided along tp: 3 x 4 each; rank 0 along pp, lent to rank 1" in words
    assert "bias 5; rank 1 along pp" in words


# --- Watching.


@pytest.mark.long
def test_watching_follows_a_run_to_its_end(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second half of the log is written while it is read."""
    monkeypatch.setattr(verb_watch, "LOOK_SECONDS", 0.01)
    lines = (run / FILE).read_text().splitlines(keepends=True)
    there = tmp_path / "run"
    there.mkdir()
    half = len(lines) - 4
    (there / FILE).write_text("".join(lines[:half]))

    def go_on() -> None:
        with (there / FILE).open("a") as stream:
            for line in lines[half:]:
                stream.write(line[:9])
                stream.flush()
                stream.write(line[9:])
                stream.flush()

    writer = threading.Timer(0.2, go_on)
    writer.start()
    assert main(["watch", str(there)]) == 0
    writer.join()
    said = capsys.readouterr().out
    assert "plan dp=2, from step 3 to 5" in said
    assert "step 5/5" in said
    assert "2 steps in " in said
    assert "step 1/3" not in said  # of before it resumed
