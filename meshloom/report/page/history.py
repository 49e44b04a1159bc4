"""What a run has written to its directory, as values for a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshloom.core.errors import ReportError
from meshloom.telemetry.run_log import FILE, read_events
from meshloom.telemetry.timeline_files import FILE as TIMELINE_FILE
from meshloom.telemetry.timeline_files import Recording, read_recording

Points = list[tuple[int, float]]  # (step, value), by step


@dataclass(kw_only=True)
class RunHistory:
    """name: of the directory. start: what the run began with; of one that was resumed, the last time. steps: what was
    measured after each step, by what it is. metrics: of evaluations, likewise. division, memory, end: as
    `train/log/run_start.py` and `telemetry/run_log.py` write them; {}: there is none yet."""

    name: str
    start: Mapping[str, Any]
    division: Mapping[str, Any]
    memory: Mapping[str, int]
    end: Mapping[str, Any]
    steps: dict[str, Points] = field(default_factory=dict[str, Points])
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
        return int(max((value for _, value in self.steps.get("memory", [])), default=0))


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
    steps = _newest_by_step(events, "step")
    for step, each in steps.items():
        for name, value in _measured(each):
            if value is not None:
                history.steps.setdefault(name, []).append((step, float(value)))
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


def _measured(event: Mapping[str, Any]) -> Iterable[tuple[str, float | None]]:
    """What a step's event says, by the names of charts' lines."""
    losses: Mapping[str, float | None] = event.get("losses") or {"loss": event.get("loss")}
    yield from ((f"loss: {name}" if name != "loss" else name, value) for name, value in losses.items())
    rates: Sequence[float] = event.get("learning_rates") or ()
    for number, rate in enumerate(dict.fromkeys(rates)):
        yield f"learning rate{f' {number + 1}' if number else ''}", rate
    yield "gradient norm", event.get("gradient_norm")
    yield "samples per second", event.get("samples_per_second")
    yield "tokens per second", event.get("tokens_per_second")
    yield "memory", event.get("memory_bytes")
    yield "age", event.get("age")
    logged: Mapping[str, float | None] = event.get("logged") or {}
    yield from ((f"logged: {name}", value) for name, value in logged.items())
