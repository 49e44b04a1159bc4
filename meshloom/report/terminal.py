"""The output of a training run: the plan and why, a line of progress, and at the end bytes and time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.table import Table
from rich.text import Text

from meshloom.core.units import format_bytes, format_clock, format_number
from meshloom.telemetry.progress import Progress
from meshloom.telemetry.summary import TimeShares
from meshloom.telemetry.timings import Timings
from meshloom.telemetry.traffic import Traffic

SECONDS_BETWEEN_LINES = 2.0
LONG_SECONDS = 2.0  # a phase that lasts longer is shown


def print_line(console: Console, text: str = "") -> None:
    """Prints the text as it is: markup has no meaning in it, and long lines are not broken."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


class Terminal:
    """Writes for people. On a terminal the progress line stays in place; in a log a line is added every few
    seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = 0.0
        self._open_line = False

    def start(self, text: str) -> None:
        """A line before the run."""
        print_line(self._console, text)

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
            print_line(self._console, text)
        if last:
            self._finish_line()

    @contextmanager
    def showing(self, timings: Timings) -> Iterator[None]:
        """A context in which a phase that lasts is named on a terminal while it does, with its seconds."""
        with LongPhases(self._console, self._finish_line, ["steps"]) as phases, phases.of(timings):
            yield

    def event(self, text: str) -> None:
        """A line of its own."""
        self._finish_line()
        print_line(self._console, text)

    def bytes_table(self, predicted: Traffic, counted: Traffic) -> None:
        """Bytes that this rank handed to collectives, predicted and counted."""
        axes = [axis for axis in counted.bytes if counted.bytes[axis] or predicted.bytes.get(axis)]
        if not axes:
            print_line(self._console, "bytes: none, one replica exchanges nothing")
            return
        table = Table("axis", "collective", box=None, pad_edge=False)
        for heading in ("predicted bytes", "counted bytes", "difference"):
            table.add_column(heading, justify="right")
        for axis in axes:
            kinds = {*predicted.bytes.get(axis, {}), *counted.bytes[axis]}
            for kind in sorted(kinds):
                expected, seen = predicted.bytes.get(axis, {}).get(kind, 0), counted.bytes[axis].get(kind, 0)
                difference = f"{seen - expected:+,}" if seen != expected else "none"
                table.add_row(axis, kind, f"{expected:,}", f"{seen:,}", difference)
        self._console.print(table)

    def time_line(self, shares: TimeShares) -> None:
        """The shares of the steps' time."""
        print_line(
            self._console,
            f"time: {shares.compute:.0%} compute, {shares.communication:.0%} communication, {shares.waiting:.0%} waiting for slower ranks, {shares.data:.0%} data",
        )

    def _finish_line(self) -> None:
        if self._open_line:
            self._console.file.write("\n")
            self._open_line = False


class LongPhases:
    """A line of what is going on, which a thread shows once it has lasted LONG_SECONDS, and which is gone when that ends.
    Nothing where the output is no terminal.

    clear: called before a line is shown. passed_over: what has a line of its own.
    """

    def __init__(
        self, console: Console, clear: Callable[[], None] = lambda: None, passed_over: Sequence[str] = ()
    ) -> None:
        self._console, self._clear, self._passed_over = console, clear, passed_over
        self._phase: str | None = None
        self._since, self._part = 0.0, ""
        self._shown: Live | None = None
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._prints: list[_Prints] = []
        self._redirected = ExitStack()

    def __enter__(self) -> LongPhases:
        if self._console.is_terminal:
            # For all phases, and here: who swallows what is printed within one (export does) restores what was there before,
            # and a thread that did so meanwhile would leave prints where they are swallowed.
            self._console.file = self._console.file
            self._prints = [_Prints(self._console, file) for file in (sys.stdout, sys.stderr)]
            self._redirected.enter_context(redirect_stdout(self._prints[0]))
            self._redirected.enter_context(redirect_stderr(self._prints[1]))
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self.enter(None)
        self._redirected.close()

    @contextmanager
    def of(self, timings: Timings) -> Iterator[None]:
        """A context in which these phases are."""
        timings.entered, timings.counted = self.enter, self.count
        try:
            yield
        finally:
            timings.entered, timings.counted = lambda phase: None, lambda done, of: None

    @contextmanager
    def within(self, timings: Timings) -> Iterator[Callable[[str], None]]:
        """A context with a function that names what is going on, and these phases are parts of."""
        about = ""

        def tell(text: str) -> None:
            nonlocal about
            about = text
            self.enter(text)

        with self.of(timings):
            timings.entered = lambda phase: self.enter(": ".join(filter(None, (about, phase))))
            yield tell

    def enter(self, phase: str | None) -> None:
        """From now on this is going on; None: nothing that is worth a line."""
        with self._lock:
            self._phase = None if phase in self._passed_over else phase
            self._since, self._part = time.monotonic(), ""
            if self._shown:
                for each in self._prints:
                    each.go(above=False)
                self._shown.stop()
                self._shown = None

    def count(self, done: int, of: int) -> None:
        """So much of what is going on is done."""
        self._part = part_text(done, of)

    def _watch(self) -> None:
        while not self._ended.wait(LONG_SECONDS / 4):
            with self._lock:
                seconds = time.monotonic() - self._since
                if self._phase is None or seconds < LONG_SECONDS:
                    continue
                text = Text(f"{self._phase}{self._part} ({seconds:.0f} s)", style="dim")
                if self._shown is None:
                    self._clear()
                    self._shown = Live(
                        console=self._console, transient=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
                    )  # fmt: skip
                    self._shown.start()
                    for each in self._prints:
                        each.go(above=True)
                self._shown.update(text, refresh=True)


class _Prints:
    """A file for what programs print: `file`, or lines above what a console shows."""

    def __init__(self, console: Console, file: Any) -> None:
        self._file = self._now = file
        self._above = FileProxy(console, file)

    def go(self, *, above: bool) -> None:
        """There from now on."""
        self._now = self._above if above else self._file
        if not above:
            self._above.flush()

    def write(self, text: str) -> int:
        """As of a text file."""
        return self._now.write(text)

    def flush(self) -> None:
        """As of a text file."""
        self._now.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def part_text(done: int, of: int) -> str:
    """How much of a phase is done: few things are counted, many in per cent.

    >>> part_text(2, 3), part_text(150, 1000), part_text(0, 0)
    (' 2 of 3', ' 15%', '')
    """
    if not of:
        return ""
    return f" {done} of {of}" if of < 20 else f" {done / of:.0%}"


def progress_text(progress: Progress) -> str:
    """One line of progress.

    >>> rates = {"learning_rates": [], "samples_per_second": 64.0, "tokens_per_second": 8192.0}
    >>> progress_text(Progress(step=3, steps=10, loss=2.5, gradient_norm=None, seconds_left=75.0, memory_bytes=300 * 2**20, **rates))
    'step  3/10  loss 2.5000  64 samples/s  8.19k tokens/s  1:15 left  300 MiB'
    >>> progress_text(Progress(step=3, steps=10, loss=2.5, gradient_norm=None, seconds_left=75.0, memory_bytes=300 * 2**20, saving=0.42, **rates))
    'step  3/10  loss 2.5000  64 samples/s  8.19k tokens/s  1:15 left  300 MiB  saving 42%'
    """
    rates = f"{format_number(progress.samples_per_second)} samples/s"
    if progress.tokens_per_second is not None:
        rates += f"  {format_number(progress.tokens_per_second)} tokens/s"
    step = f"step {progress.step:>{len(str(progress.steps))}}/{progress.steps}"
    clock = f"  at {progress.virtual_seconds:g} s" if progress.virtual_seconds is not None else ""
    old = f"  age {progress.age:.1f}" if progress.age is not None else ""
    left = f"{format_clock(progress.seconds_left)} left  {format_bytes(progress.memory_bytes)}"
    losses = {"loss": progress.loss, **progress.logged}
    shown = "  ".join(f"{name} {value:.4f}" for name, value in losses.items())
    saving = f"  saving {progress.saving:.0%}" if progress.saving is not None else ""
    return f"{step}{clock}  {shown}{old}  {rates}  {left}{saving}"
