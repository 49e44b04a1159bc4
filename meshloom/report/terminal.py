"""The output of a training run: the plan and why, a line of progress, and at the end bytes and time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from meshloom.core.units import format_bytes, format_clock, format_number
from meshloom.telemetry.summary import TimeShares
from meshloom.telemetry.traffic import Traffic

SECONDS_BETWEEN_LINES = 2.0


class Terminal:
    """Writes for people. On a terminal the progress line stays in place; in a log a line is added every few
    seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = 0.0
        self._open_line = False

    def start(self, text: str) -> None:
        """A line before the run."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, text: str, *, last: bool) -> None:
        """The progress line, if it is due."""
        now = time.monotonic()
        if not last and now - self._last < (0.1 if self._console.is_terminal else SECONDS_BETWEEN_LINES):
            return
        self._last = now
        if self._console.is_terminal:
            # Carriage return, the line, and the rest of an older longer line erased.
            self._console.file.write(f"\r{text[: self._console.width - 1]}\x1b[K")
            self._console.file.flush()
            self._open_line = True
        else:
            self._print(text)
        if last:
            self._finish_line()

    def event(self, text: str) -> None:
        """A line of its own."""
        self._finish_line()
        self._print(text)

    def bytes_table(self, predicted: Traffic, counted: Traffic) -> None:
        """Bytes that this rank handed to collectives, predicted and counted."""
        axes = [axis for axis in counted.bytes if counted.bytes[axis] or predicted.bytes.get(axis)]
        if not axes:
            self._print("bytes: none, one replica exchanges nothing")
            return
        table = Table("axis", "collective", box=None, pad_edge=False)
        for heading in ("predicted bytes", "counted bytes", "difference"):
            table.add_column(heading, justify="right")
        for axis in axes:
            kinds = {*predicted.bytes.get(axis, {}), *counted.bytes[axis]}
            for kind in sorted(kinds):
                expected, seen = predicted.bytes.get(axis, {}).get(kind, 0), counted.bytes[axis].get(kind, 0)
                table.add_row(
                    axis,
                    kind,
                    f"{expected:,}",
                    f"{seen:,}",
                    f"{seen - expected:+,}" if seen != expected else "none",
                )
        self._console.print(table)

    def time_line(self, shares: TimeShares) -> None:
        """The shares of the steps' time."""
        self._print(
            f"time: {shares.compute:.0%} compute, {shares.communication:.0%} communication, {shares.waiting:.0%} waiting for slower ranks, {shares.data:.0%} data"
        )

    def _finish_line(self) -> None:
        if self._open_line:
            self._console.file.write("\n")
            self._open_line = False

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def progress_text(
    *,
    step: int,
    steps: int,
    loss: float,
    samples_per_second: float,
    tokens_per_second: float | None,
    seconds_left: float,
    memory_bytes: int,
    age: float | None = None,
    virtual_seconds: float | None = None,
) -> str:
    """One line of progress.

    >>> progress_text(step=3, steps=10, loss=2.5, samples_per_second=64.0, tokens_per_second=8192.0, seconds_left=75.0, memory_bytes=300 * 2**20)
    'step  3/10  loss 2.5000  64 samples/s  8.19k tokens/s  1:15 left  300 MiB'
    """
    tokens = f"  {format_number(tokens_per_second)} tokens/s" if tokens_per_second is not None else ""
    width = len(str(steps))
    clock = f"  at {virtual_seconds:g} s" if virtual_seconds is not None else ""
    old = f"  age {age:.1f}" if age is not None else ""
    rates = f"{format_number(samples_per_second)} samples/s{tokens}"
    return f"step {step:>{width}}/{steps}{clock}  loss {loss:.4f}{old}  {rates}  {format_clock(seconds_left)} left  {format_bytes(memory_bytes)}"


def evaluation_text(step: int, metrics: Mapping[str, float]) -> str:
    """One line of metrics."""
    return f"step {step}  evaluation: " + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def saved_text(step: int, path: Path) -> str:
    """A line with the path of a checkpoint."""
    return f"step {step}  checkpoint: {path}"
