"""The events of a run as JSON lines in its directory, `events.jsonl`, for whoever looks at it later.

A run that resumes adds to what is there; of a step that was done twice, the newer record counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TextIO

from meshloom.core.errors import ReportError
from meshloom.core.losses.loss_scale import LossScale
from meshloom.telemetry.progress import Listener, Progress
from meshloom.telemetry.summary import Summary

FILE = "events.jsonl"


class RunLog:
    """Of the run whose directory it is. Nothing is written before the run has started, which may be refused.

    goes_on: whether the run resumes one of this directory; otherwise the file is begun anew.
    """

    def __init__(self, directory: Path, *, goes_on: bool) -> None:
        self._path, self._goes_on = directory / FILE, goes_on
        self._stream: TextIO | None = None
        self._before: list[str] = []  # lines of events before the start

    def write(self, event: str, **values: Any) -> None:
        """A line that the system has when this returns. Numbers that are not finite become null, as JSON has none."""
        line = json.dumps({"event": event, **_finite(values)}) + "\n"
        if self._stream is None:
            self._before.append(line)
            return
        self._stream.write(line)
        self._stream.flush()

    def start(self, **values: Any) -> None:
        """The event `start`, with what the run begins with. Raises `ReportError` if the file cannot be written."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = self._path.open("a" if self._goes_on else "w", encoding="utf-8")
        except OSError as error:
            raise ReportError(
                f"{self._path} cannot be written: {error.strerror}. Give an --out directory that can."
            ) from None
        self.write("start", **values)
        self._stream.writelines(self._before)
        self._before.clear()

    def listener(self) -> Listener:
        """What writes all that it hears but the end."""
        return Listener(
            started=lambda text: self.write("started", text=text),
            step=lambda progress: self.write("step", **asdict(progress)),
            evaluated=lambda step, metrics: self.write("evaluation", step=step, metrics=metrics),
            saved=lambda step, path: self.write("checkpoint", step=step, path=str(path)),
            note=lambda text: self.write("note", text=text),
        )

    def end(self, summary: Summary) -> None:
        """The last line of a run that came to its end."""
        self.write("end", **summary_values(summary))

    def close(self) -> None:
        """Idempotent."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def summary_values(summary: Summary) -> dict[str, Any]:
    """A summary as plain values: bytes by axis and kind, time as shares of the steps."""
    values: dict[str, Any] = {
        "steps": summary.steps,
        "seconds": summary.seconds,
        "first_loss": summary.first_loss,
        "last_loss": summary.last_loss,
        "evaluation": summary.evaluation,
        "bytes": {"predicted": summary.predicted.bytes, "counted": summary.counted.bytes},
        "time": asdict(summary.shares),
        "checkpoint": str(summary.checkpoint) if summary.checkpoint else None,
    }
    if summary.compiled:
        values["compiled"] = asdict(summary.compiled)
    if summary.scale:
        values["loss_scale"] = summary.scale.to_dict()
    return values


def progress_of(event: Mapping[str, Any]) -> Progress:
    """What a line `step` was written of."""
    known = {each.name for each in fields(Progress)}
    values = {name: value for name, value in event.items() if name in known}
    values["loss"] = number_in(values["loss"])  # of a step that was skipped
    values["logged"] = {each: number_in(value) for each, value in values.get("logged", {}).items()}
    if values.get("loss_scale"):
        values["loss_scale"] = LossScale.from_dict(values["loss_scale"])
    return Progress(**values)


def number_in(value: float | None) -> float:
    """Of a line: what it has as null was not finite."""
    return math.nan if value is None else value


def read_events(directory: Path) -> list[dict[str, Any]]:
    """The lines of `events.jsonl`, but for a last one that is being written. Raises `ReportError`."""
    return events_after(directory, 0)[0]


def events_after(directory: Path, place: int) -> tuple[list[dict[str, Any]], int]:
    """The lines that begin at byte `place` or later, and the place after them. Raises `ReportError`."""
    path = directory / FILE
    try:
        with path.open("rb") as stream:
            stream.seek(place)
            whole = stream.read()
    except FileNotFoundError:
        raise ReportError(
            f"{directory} has no {FILE}, which a run writes that is given this directory as --out."
        ) from None
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}.") from None
    lines = whole[: whole.rfind(b"\n") + 1]
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines.splitlines(), start=1):
        try:
            events.append(dict(json.loads(line)))
        except (TypeError, ValueError):
            after = f" after byte {place}" if place else ""
            raise ReportError(f"Line {number}{after} of {path} is no JSON record: {line[:60]!r}.") from None
    return events, place + len(lines)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value
