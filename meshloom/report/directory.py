"""The contents of a run's directory: checkpoints, the plan that they were saved under, timelines."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from meshloom.checkpoint.format import checkpoint_directories, committed, read_meta
from meshloom.core.errors import ReportError
from meshloom.report.chrome_trace import trace_text
from meshloom.report.drawing import print_timeline
from meshloom.report.picture import save_picture
from meshloom.telemetry.timeline import idle_of
from meshloom.telemetry.timeline_files import FILE, Recording, read_recording

ENDINGS = (".svg", ".png", ".json")  # of a timeline's file


@dataclass(frozen=True, kw_only=True)
class RunDirectory:
    """path: of the directory. plan: of the newest checkpoint or timeline. last_step: the last known one,
    counted from 1. checkpoints: step and path of the complete ones, in the order of writing. damaged: paths
    of others."""

    path: Path
    plan: str
    last_step: int
    checkpoints: tuple[tuple[int, Path], ...]
    damaged: tuple[Path, ...]
    recording: Recording | None


def read_run_directory(path: Path) -> RunDirectory:
    """Raises `ReportError` if the directory contains nothing of a run."""
    if not path.is_dir():
        raise ReportError(f"There is no directory {path}. Give the one that the run was given as --out.")
    metas: list[tuple[Path, Mapping[str, Any]]] = [
        (each, meta) for each in reversed(committed(path)) if (meta := read_meta(each)) is not None
    ]
    damaged = tuple(
        each for each in checkpoint_directories(path) if each not in [known for known, _ in metas]
    )
    recording = read_recording(path) if (path / FILE).exists() else None
    if not metas and not damaged and recording is None:
        raise ReportError(
            f"{path} has no checkpoint and no {FILE}. Give the directory that a run was given as --out."
        )
    plans = [str(meta["plan"]) for _, meta in metas] + ([recording.plan] if recording else [])
    steps = [int(meta["step"]) for _, meta in metas[-1:]] + (
        [recording.timelines[-1].step] if recording else []
    )
    return RunDirectory(
        path=path,
        plan=plans[-1] if plans else "unknown",
        last_step=max(steps, default=0),
        checkpoints=tuple((int(meta["step"]), each) for each, meta in metas),
        damaged=damaged,
        recording=recording,
    )


def print_run_directory(run: RunDirectory, console: Console) -> None:
    """A few lines."""
    _line(console, f"{run.path}: plan {run.plan}, step {run.last_step}")
    for step, path in run.checkpoints:
        _line(console, f"checkpoint of step {step}: {path}")
    for path in run.damaged:
        _line(console, f"damaged: {path}")
    if not run.checkpoints:
        _line(console, "checkpoints: none")
    for timeline in run.recording.timelines if run.recording else ():
        idle = idle_of(timeline)
        measured, formula = (
            statistics.fmean(each.measured for each in idle),
            statistics.fmean(each.formula for each in idle),
        )
        _line(
            console,
            f"timeline of step {timeline.step}: {timeline.schedule.name}, idle {measured:.1%} of the time, formula {formula:.1%}",
        )
    if run.recording is None:
        _line(console, "timelines: none (a run with pp=2 or more records them)")


def run_directory_records(run: RunDirectory) -> list[dict[str, Any]]:
    """The same as records."""
    records: list[dict[str, Any]] = [
        {"event": "run", "path": str(run.path), "plan": run.plan, "step": run.last_step}
    ]
    records += [{"event": "checkpoint", "step": step, "path": str(path)} for step, path in run.checkpoints]
    for timeline in run.recording.timelines if run.recording else ():
        for row, idle in zip(timeline.rows, idle_of(timeline), strict=True):
            records.append({"event": "idle", "step": timeline.step, "rank": row.rank, **vars(idle)})
    return records


def check_ending(file: str) -> None:
    """Raises `ReportError` for a timeline's file of another type; `-` is the terminal."""
    if file != "-" and Path(file).suffix.lower() not in ENDINGS:
        raise ReportError(
            f"--timeline {file} ends in none of {', '.join(ENDINGS)}. Give one of these, or - for the terminal."
        )


def show_timeline(directory: Path, file: str, step: int | None, console: Console) -> None:
    """Shows the timeline of a step, by default the newest, of the run in a directory: in the terminal (`-`),
    or as a file of the type of its ending."""
    check_ending(file)
    recording = read_recording(directory)
    timeline = recording.timeline(step)
    if file == "-":
        print_timeline(timeline, console, recording.plan)
        return
    path = Path(file)
    if path.suffix.lower() == ".json":
        try:
            path.write_text(trace_text(timeline), encoding="utf-8")
        except OSError as error:
            raise ReportError(
                f"{path} cannot be written: {error.strerror}. Give a file in a directory that exists."
            ) from None
    else:
        save_picture(timeline, path, recording.plan)
    hint = "; open it in ui.perfetto.dev or chrome://tracing" if path.suffix.lower() == ".json" else ""
    _line(console, f"step {timeline.step} written to {path}{hint}")


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
