"""metrics.csv in a run's directory: a line for every step and every evaluation, with all that was logged."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from meshloom.telemetry.numbers import numbers_of, numbers_of_evaluation
from meshloom.telemetry.progress import Listener, Progress

METRICS = "metrics.csv"


def metrics_listener(directory: Path, note: Callable[[str], None]) -> Listener:
    """Writes the numbers of a run to its directory. note: told once if that cannot be done."""
    file = _MetricsFile(directory / METRICS, note)

    def step(progress: Progress) -> None:
        file.add(progress.step, numbers_of(progress))

    def evaluated(step: int, metrics: dict[str, float]) -> None:
        file.add(step, numbers_of_evaluation(metrics))

    return Listener(started=lambda text: None, note=lambda text: None, step=step, evaluated=evaluated)


class _MetricsFile:
    """A new name becomes a column on the right. What an earlier run has written of later steps is dropped: a run that
    goes on with step 101 keeps the lines of steps 1 to 100."""

    def __init__(self, path: Path, note: Callable[[str], None]) -> None:
        self._path, self._note = path, note
        self._columns: list[str] = []
        self._broken = False

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """A line."""
        if self._broken:
            return
        try:
            kept = self._read_before(step) if not self._columns else None
            new = [name for name in ("step", *numbers) if name not in self._columns]
            if kept is not None or new:
                self._rewrite(self._read_before(step + 1) if kept is None else kept, new)
            with self._path.open("a", newline="", encoding="utf-8") as stream:
                csv.DictWriter(stream, self._columns, lineterminator="\n").writerow({"step": step, **numbers})
        except OSError as error:
            self._broken = True
            self._note(f"{self._path} cannot be written: {error.strerror}. The run goes on without it.")

    def _read_before(self, step: int) -> list[dict[str, str]]:
        if not self._path.exists():
            return []
        with self._path.open(newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            if not self._columns:
                self._columns = list(reader.fieldnames or ()) if step > 1 else []
            return [row for row in reader if (row["step"] or "").isdigit() and int(row["step"]) < step]

    def _rewrite(self, rows: list[dict[str, str]], new: list[str]) -> None:
        self._columns += [name for name in new if name not in self._columns]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_name(f".{self._path.name}.part")
        with beside.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, self._columns, lineterminator="\n", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(beside, self._path)
