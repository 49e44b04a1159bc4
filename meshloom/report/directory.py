"""The contents of a run's directory: checkpoints, the plan that they were saved under, timelines."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from meshloom.checkpoint.format import checkpoint_directories, committed, read_meta
from meshloom.core.errors import ReportError
from meshloom.report.chrome_trace import chrome_trace
from meshloom.report.drawing import print_timeline
from meshloom.report.picture import save_picture
from meshloom.report.terminal import print_line
from meshloom.report.written_file import write_file
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
    known = [each for each, _ in metas]
    damaged = tuple(each for each in checkpoint_directories(path) if each not in known)
    recording = read_recording(path) if (path / FILE).exists() else None
    if not metas and not damaged and recording is None:
        raise ReportError(
            f"{path} has no checkpoint and no {FILE}. Give the directory that a run was given as --out."
        )
    plans = [str(meta["plan"]) for _, meta in metas]
    steps = [int(meta["step"]) for _, meta in metas[-1:]]
    if recording:
        plans.append(recording.plan)
        steps.append(recording.timelines[-1].step)
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
    print_line(console, f"{run.path}: plan {run.plan}, step {run.last_step}")
    for step, path in run.checkpoints:
        print_line(console, f"checkpoint of step {step}: {path}")
    for path in run.damaged:
        print_line(console, f"damaged: {path}")
    if not run.checkpoints:
        print_line(console, "checkpoints: none")
    for timeline in run.recording.timelines if run.recording else ():
        idle = idle_of(timeline)
        measured = statistics.fmean(each.measured for each in idle)
        formula = statistics.fmean(each.formula for each in idle)
        shares = f"idle {measured:.1%} of the time, formula {formula:.1%}"
        print_line(console, f"timeline of step {timeline.step}: {timeline.schedule.name}, {shares}")
    if run.recording is None:
        print_line(console, "timelines: none (a run with pp=2 or more records them)")


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
        write_file(path, json.dumps(chrome_trace(timeline)) + "\n")
    else:
        save_picture(timeline, path, recording.plan)
    hint = "; open it in ui.perfetto.dev or chrome://tracing" if path.suffix.lower() == ".json" else ""
    print_line(console, f"step {timeline.step} written to {path}{hint}")
