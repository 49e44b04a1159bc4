"""What is printed says what was measured, one line a thing."""

from __future__ import annotations

import io
import sys
import threading
from contextlib import redirect_stdout

import pytest
from rich.console import Console

from meshloom.report.terminal import LongPhases, Terminal, progress_text
from meshloom.telemetry.progress import Progress
from meshloom.telemetry.timings import Timings
from meshloom.telemetry.traffic import Traffic


def _terminal() -> tuple[Terminal, io.StringIO]:
    stream = io.StringIO()
    return Terminal(Console(file=stream, width=100, force_terminal=False)), stream


def test_a_log_gets_the_first_and_the_last_line_only_of_fast_steps() -> None:
    terminal, stream = _terminal()
    for step in range(1, 6):
        terminal.step(f"step {step}", last=step == 5)
    assert stream.getvalue().splitlines() == ["step 1", "step 5"]


def test_a_terminal_keeps_its_line_until_something_else_is_said() -> None:
    stream = io.StringIO()
    terminal = Terminal(Console(file=stream, width=20, force_terminal=True))
    terminal.step("step 1 of a text that is too long for the line", last=False)
    terminal.event("saved")
    first, second = stream.getvalue().split("\n")[:2]
    assert first == "\rstep 1 of a text th\x1b[K"
    assert second == "saved"


def test_bytes_that_differ_from_the_formula_are_seen() -> None:
    terminal, stream = _terminal()
    terminal.bytes_table(
        Traffic({"dp": {"all_reduce": 1000, "all_gather": 5}}),
        Traffic({"dp": {"all_reduce": 1200, "all_gather": 5}}),
    )
    rows = {line.split()[1]: line.split()[2:] for line in stream.getvalue().splitlines()[1:]}
    assert rows == {"all_reduce": ["1,000", "1,200", "+200"], "all_gather": ["5", "5", "none"]}


def test_one_replica_says_that_it_exchanges_nothing() -> None:
    terminal, stream = _terminal()
    terminal.bytes_table(Traffic({"dp": {}}), Traffic({"dp": {}}))
    assert "exchanges nothing" in stream.getvalue()


def test_progress_without_tokens_leaves_them_out() -> None:
    progress = Progress(
        step=1,
        steps=9,
        loss=1.0,
        gradient_norm=None,
        learning_rates=[],
        samples_per_second=10.0,
        tokens_per_second=None,
        seconds_left=3700.0,
        memory_bytes=20 * 2**30,
    )
    assert progress_text(progress) == "step 1/9  loss 1.0000  10 samples/s  1:01:40 left  20 GiB"


class Waited(io.StringIO):
    """A stream that is waited for until it has a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text, self.there = text, threading.Event()

    def wait_for(self, text: str) -> None:
        """From now on, this text."""
        self._text = text

    def write(self, text: str, /) -> int:
        written = super().write(text)
        if self._text in self.getvalue():
            self.there.set()
        return written


def test_a_phase_that_lasts_is_named_while_it_does_and_gone_afterwards(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("meshloom.report.terminal.LONG_SECONDS", 0.05)
    stream, timings, before = Waited("comparing with eager ("), Timings(), threading.active_count()
    console = Console(file=stream, width=60, force_terminal=True, color_system=None)
    with LongPhases(console, passed_over=["steps"]) as phases, phases.of(timings):
        with timings.of("reading"), timings.of("comparing with eager"):
            assert stream.there.wait(20)
        with timings.of("steps"):
            pass
    assert stream.getvalue().endswith(("\x1b[2K", "\x1b[?25h"))  # erased, and the cursor back
    assert "steps" not in stream.getvalue()
    assert threading.active_count() == before


def test_a_phase_says_how_much_is_done_where_that_is_known(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("meshloom.report.terminal.LONG_SECONDS", 0.05)
    stream, timings = Waited("evaluating 35% ("), Timings()
    console = Console(file=stream, width=60, force_terminal=True, color_system=None)
    with LongPhases(console) as phases, phases.of(timings):
        with timings.of("evaluating"):
            timings.counted(35, 100)
            assert stream.there.wait(20)
        with timings.of("saving"):
            stream.there.clear()
            stream.wait_for("saving (")
            assert stream.there.wait(20)


def test_what_is_done_for_a_plan_is_named_after_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("meshloom.report.terminal.LONG_SECONDS", 0.05)
    stream, timings = Waited("rehearsing plan 2 of 12: tp=2: reading 40% ("), Timings()
    console = Console(file=stream, width=80, force_terminal=True, color_system=None)
    with LongPhases(console) as phases, phases.within(timings) as tell:
        tell("rehearsing plan 2 of 12: tp=2")
        with timings.of("reading"):
            timings.counted(40, 100)
            assert stream.there.wait(20)
        stream.there.clear()
        stream.wait_for("tp=2 (")
        assert stream.there.wait(20)


def test_what_is_printed_behind_a_phase_that_swallows_prints_is_there(monkeypatch: pytest.MonkeyPatch):
    """`torch.export` prints, and is not let; a line that was shown meanwhile took the place where that went for the
    terminal, and nothing was printed any more."""
    monkeypatch.setattr("meshloom.report.terminal.LONG_SECONDS", 0.05)
    stream, swallowed = Waited("reading ("), io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    console = Console(width=60, force_terminal=True, color_system=None)
    with LongPhases(console) as phases:
        phases.enter("reading")
        with redirect_stdout(swallowed):
            print("from export")
            assert stream.there.wait(20)
        print("meanwhile")
        phases.enter(None)
        print("behind", end="")
    console.print("after")
    assert swallowed.getvalue() == "from export\n"
    said = stream.getvalue()
    assert "meanwhile\n" in said and said.endswith("behindafter\n") and sys.stdout is stream


def test_nothing_is_shown_where_there_is_no_terminal():
    stream, before = io.StringIO(), threading.active_count()
    with LongPhases(Console(file=stream, force_terminal=False)) as phases:
        phases.enter("reading")
        assert threading.active_count() == before
    assert stream.getvalue() == ""


def test_timings_say_which_phase_is_open():
    timings, entered = Timings(), list[str | None]()
    timings.entered = entered.append
    with timings.of("copying values"), timings.of("reading"):
        pass
    assert entered == ["copying values", "reading", "copying values", None]
