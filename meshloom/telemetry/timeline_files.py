"""The timelines of a run as `timeline.json` in its directory: those of the first few steps, the first of
which shows what is done once, and of the last step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshloom.core.errors import ReportError
from meshloom.telemetry.timeline import Timeline

FILE = "timeline.json"
VERSION = 1
FIRST_STEPS = 3  # that are kept


@dataclass(frozen=True, kw_only=True)
class Recording:
    """plan: its text. timelines: of the steps that were kept, in order."""

    plan: str
    timelines: tuple[Timeline, ...]

    def __post_init__(self) -> None:
        if not self.timelines:
            raise ReportError("A recording has the timeline of one step or more, and this one has none.")

    def timeline(self, step: int | None = None) -> Timeline:
        """Of a step; without one, the newest. Raises `ReportError` when it was not kept."""
        found = [each for each in self.timelines if step in (None, each.step)]
        if not found:
            raise ReportError(
                f"There is no timeline of step {step}. There is one of step {_list([each.step for each in self.timelines])}."
            )
        return found[-1]


def is_kept(step: int, steps_before: int, num_steps: int) -> bool:
    """Whether a step's timeline is kept. step: counted from 1, as progress is. steps_before: done when this
    run began. num_steps: in all.

    >>> [step for step in range(1, 11) if is_kept(step, 0, 10)], [step for step in range(5, 11) if is_kept(step, 4, 10)]
    ([1, 2, 3, 10], [5, 6, 7, 10])
    """
    return step <= steps_before + FIRST_STEPS or step == num_steps


def write_recording(directory: Path, recording: Recording) -> Path:
    """Write `timeline.json`, in place of an existing one. Raises `ReportError` if that fails."""
    path = directory / FILE
    steps = [each.to_dict() for each in recording.timelines]
    text = json.dumps({"version": VERSION, "plan": recording.plan, "steps": steps})
    try:
        directory.mkdir(parents=True, exist_ok=True)
        temporary = directory / f".{FILE}"
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ReportError(
            f"{path} cannot be written: {error.strerror}. Give an --out directory that can."
        ) from None
    return path


def read_recording(directory: Path) -> Recording:
    """Of the run whose directory it is."""
    path = directory / FILE
    if not directory.is_dir():
        raise ReportError(f"There is no directory {directory}. Give the one that the run was given as --out.")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ReportError(
            f"{directory} has no {FILE}: no timeline was recorded. A run with several stages records one: meshloom train FILE.py --plan pp=2 --out {directory}."
        ) from None
    except (OSError, ValueError) as error:
        raise ReportError(f"{path} cannot be read: {error}. Train again with --out.") from None
    try:
        version, plan, steps = values["version"], values["plan"], values["steps"]
    except (KeyError, TypeError):
        raise ReportError(f"{path} is no timeline as meshloom writes it. Train again with --out.") from None
    if version != VERSION:
        raise ReportError(
            f"{path} has version {version} of the format, and this meshloom reads version {VERSION}. Train again with --out."
        )
    try:
        return Recording(plan=plan, timelines=tuple(Timeline.from_dict(each) for each in steps))
    except ReportError as error:
        raise ReportError(f"{path}: {error} Train again with --out.") from None


def _list(steps: Sequence[int]) -> str:
    """
    >>> _list([1, 2, 9]), _list([4])
    ('1, 2 and 9', '4')
    """
    *first, last = map(str, steps)
    return f"{', '.join(first)} and {last}" if first else last
