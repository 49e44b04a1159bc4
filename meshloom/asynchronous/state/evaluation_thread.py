"""Evaluates and saves one snapshot of a run on processes in a thread, while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from meshloom.asynchronous.state.settings import AsynchronousSettings
from meshloom.asynchronous.state.snapshot_evaluation import Inspection
from meshloom.asynchronous.state.snapshots import read_snapshot
from meshloom.core.job import Job


class Look(threading.Thread):
    """At the snapshot of update `version`, whose files are `paths`, by server; they are removed. evaluation,
    saved, error: what came of it."""

    def __init__(
        self,
        inspection: Inspection,
        settings: AsynchronousSettings,
        job: Job,
        version: int,
        paths: Sequence[Path],
    ) -> None:
        super().__init__(daemon=True)  # a run that ends early does not wait for it
        self.version = version
        self.evaluation: dict[str, float] | None = None
        self.saved: Path | None = None
        self.error: BaseException | None = None
        self._inspection, self._settings, self._job, self._paths = inspection, settings, job, paths

    def run(self) -> None:
        try:
            snapshots = [read_snapshot(path) for path in self._paths]
            contents = [content for _, content in snapshots]
            if self._settings.evaluates(self._job, self.version):
                self.evaluation = self._inspection.evaluate(contents)
            if self._settings.saves(self._job, self.version):
                self.saved = self._inspection.save(self.version, contents, snapshots[0][0].state)
            for path in self._paths:
                path.unlink()
        except BaseException as error:
            self.error = error
