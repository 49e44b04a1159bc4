"""What is printed says what was measured, one line a thing."""

from __future__ import annotations

import io

from rich.console import Console

from meshloom.report.terminal import Terminal, progress_text
from meshloom.telemetry.progress import Progress
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
