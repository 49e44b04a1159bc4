"""What a run has written to its directory, as values for a page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshloom.core.errors import ReportError
from meshloom.telemetry.numbers import numbers_of
from meshloom.telemetry.progress import Progress
from meshloom.telemetry.run_log import FILE, progress_of, read_events
from meshloom.telemetry.timeline_files import FILE as TIMELINE_FILE
from meshloom.telemetry.timeline_files import Recording, read_recording

Points = list[tuple[int, float]]  # (step, value), by step


@dataclass(kw_only=True)
class RunHistory:
    """name: of the directory. start: what the run began with; of one that was resumed, the last time. steps: what was
    measured after each step, by what it is; logged: which of these the loss logs. metrics: of evaluations, likewise. division, memory, end: as
    `train/log/run_start.py` and `telemetry/run_log.py` write them; {}: there is none yet."""

    name: str
    start: Mapping[str, Any]
    division: Mapping[str, Any]
    memory: Mapping[str, int]
    end: Mapping[str, Any]
    steps: dict[str, Points] = field(default_factory=dict[str, Points])
    logged: list[str] = field(default_factory=list[str])
    metrics: dict[str, Points] = field(default_factory=dict[str, Points])
    checkpoints: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    notes: list[str] = field(default_factory=list[str])
    recording: Recording | None = None

    @property
    def last_step(self) -> int:
        """The newest known one, counted from 1."""
        return max((points[-1][0] for points in self.steps.values() if points), default=0)

    @property
    def peak_bytes(self) -> int:
        """The most memory of the process that reports, so far."""
        return int(max((value for _, value in self.steps.get("memory_bytes", [])), default=0))


def read_history(directory: Path) -> RunHistory:
    """Raises `ReportError` if there is no run's log in the directory."""
    if not directory.is_dir():
        raise ReportError(f"There is no directory {directory}. Give the one that the run was given as --out.")
    events = read_events(directory)
    newest = {str(each["event"]): each for each in events}
    if "start" not in newest:
        raise ReportError(f"{directory / FILE} does not say how its run started. Train again with --out.")
    after_start = events[max(number for number, each in enumerate(events) if each["event"] == "start") :]
    history = RunHistory(
        name=directory.name or str(directory),
        start=newest["start"],
        division=newest.get("division", {}),
        memory=newest.get("memory", {}),
        end=next((each for each in after_start if each["event"] == "end"), {}),
        recording=read_recording(directory) if (directory / TIMELINE_FILE).exists() else None,
    )
    progresses = [progress_of(each) for each in _newest_by_step(events, "step").values()]
    history.steps = _points(progresses)
    history.logged = list(dict.fromkeys(name for each in progresses for name in each.logged))
    for step, each in _newest_by_step(events, "evaluation").items():
        for name, value in each["metrics"].items():
            if value is not None:
                history.metrics.setdefault(name, []).append((step, float(value)))
    history.checkpoints = [
        (step, str(each["path"])) for step, each in _newest_by_step(events, "checkpoint").items()
    ]
    history.notes = list(dict.fromkeys(str(each["text"]) for each in events if each["event"] == "note"))
    return history


def _newest_by_step(events: Sequence[Mapping[str, Any]], kind: str) -> dict[int, Mapping[str, Any]]:
    found = {int(each["step"]): each for each in events if each["event"] == kind}
    return dict(sorted(found.items()))


def _points(progresses: Iterable[Progress]) -> dict[str, Points]:
    """By the names of `telemetry/numbers.py`. A learning rate that is always another's is left out."""
    found: dict[str, Points] = {}
    for progress in progresses:
        for name, value in numbers_of(progress).items():
            if math.isfinite(value):
                found.setdefault(name, []).append((progress.step, value))
    rates = [name for name in found if name.startswith("learning_rate.")]
    for name in rates:
        if any(
            found[name] == points
            for other, points in found.items()
            if other < name and other.startswith("learning_rate")
        ):
            del found[name]
    return found
