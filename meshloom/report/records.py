"""The events of a run as JSON lines for programs, and as lines for people."""

from __future__ import annotations

import json
import math
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from meshloom.core.errors import JobError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.units import format_count
from meshloom.report.terminal import Terminal, progress_text
from meshloom.telemetry.progress import Listener, Progress, all_of
from meshloom.telemetry.run_log import summary_values
from meshloom.telemetry.summary import Summary


class Records:
    """JSON lines, one per event, or nothing. The file is created by the first line, so only the reporting
    process creates it."""

    def __init__(self, path: str | None, stack: ExitStack) -> None:
        self._path = path
        self._stack = stack
        self._stream: TextIO | None = None

    def write(self, event: str, **values: Any) -> None:
        if self._path is None:
            return
        if self._stream is None:
            self._stream = self._open(self._path)
        self._stream.write(json.dumps({"event": event, **values}) + "\n")
        self._stream.flush()

    def _open(self, path: str) -> TextIO:
        if path == "-":
            return sys.stdout
        try:
            return self._stack.enter_context(Path(path).open("w", encoding="utf-8"))
        except OSError as error:
            raise JobError(
                f"--json {path} cannot be written: {error.strerror}. Give a file in a directory that exists, or - for standard output."
            ) from None


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """What a run begins with. model: its class. steps: of the whole run. step: from which it starts. devices,
    why: of the world. digest: of what runs; "": none is known."""

    job: Job
    plan: Plan
    model: str
    parameters: int
    steps: int
    step: int
    devices: str
    why: str
    digest: str = ""

    def announce(self, terminal: Terminal) -> None:
        """A line for people."""
        plan, samples = self.plan, format_count(self.job.batch_size, "sample")
        per_replica = f"{format_count(plan.dp, 'replica' if plan.synchronous else 'worker')} x {format_count(plan.microbatches, 'chunk')}"
        start = f", from step {self.step}" if self.step else ""
        terminal.start(
            f"{self.model}, {self.parameters:,} parameters; batches of {samples} over {per_replica}; {format_count(self.steps, 'step')}{start}"
            + (f"; what runs has digest {self.digest}" if self.digest else "")
        )

    def record(self, records: Records) -> None:
        """The same for programs, with the devices."""
        records.write(
            "start", plan=str(self.plan), devices=self.devices, why=self.why, model=self.model, parameters=self.parameters,
            batch_size=self.job.batch_size, steps=self.steps, step=self.step, digest=self.digest,
        )  # fmt: skip


def listener_for(terminal: Terminal, records: Records) -> Listener:
    """Reports a run's events to both."""
    recording = Listener(
        started=lambda text: None,
        note=lambda text: None,
        step=lambda progress: _record_progress(progress, records),
        evaluated=lambda step, metrics: records.write("evaluation", step=step, metrics=metrics),
        saved=lambda step, path: records.write("checkpoint", step=step, path=str(path)),
    )
    return all_of([terminal_listener(terminal), recording])


def terminal_listener(terminal: Terminal) -> Listener:
    """Reports a run's events to people."""

    def step(progress: Progress) -> None:
        terminal.step(progress_text(progress), last=progress.step == progress.steps)

    def evaluated(step: int, metrics: dict[str, float]) -> None:
        shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        terminal.event(f"step {step}  evaluation: {shown}")

    def saved(step: int, path: Path) -> None:
        terminal.event(f"step {step}  checkpoint: {path}")

    return Listener(started=terminal.start, note=terminal.event, step=step, evaluated=evaluated, saved=saved)


def outcome_text(steps: int, seconds: float, first_loss: float, last_loss: float) -> str:
    """A line about a run that has come to its end."""
    return f"{format_count(steps, 'step')} in {seconds:.1f} s: loss {first_loss:.4f} -> {last_loss:.4f}"


def tell_summary(summary: Summary, terminal: Terminal, records: Records) -> None:
    """A run's results, for both."""
    terminal.event(outcome_text(summary.steps, summary.seconds, summary.first_loss, summary.last_loss))
    terminal.bytes_table(summary.predicted, summary.counted)
    terminal.time_line(summary.shares)
    if summary.compiled:
        terminal.event(str(summary.compiled))
    if summary.scale:
        terminal.event(
            f"{format_count(summary.scale.skipped, 'step')} skipped, as gradients overflowed float16; at the end the loss is scaled by {summary.scale.scale:g}"
        )
    records.write("end", **summary_values(summary))


def _record_progress(progress: Progress, records: Records) -> None:
    values = asdict(progress)
    if not math.isfinite(progress.loss):  # of a skipped step; JSON has no such numbers
        values["loss"] = None
    records.write("step", **values)
