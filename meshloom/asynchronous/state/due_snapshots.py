"""Snapshots of a run on processes that are due: evaluated and saved in a thread while training goes on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from meshloom.asynchronous.state.settings import AsynchronousSettings
from meshloom.asynchronous.state.snapshot_evaluation import Inspection
from meshloom.asynchronous.state.snapshots import due_path, read_snapshot
from meshloom.core.job import Job
from meshloom.telemetry.progress import Listener


class DueSnapshots:
    """evaluation, saved: the newest results. newest: the version of the newest snapshot; at first that of the start,
    which is not due.

    ending: whether the run is to end with a checkpoint of the next snapshot, and evaluates no more.
    """

    def __init__(
        self, inspection: Inspection, settings: AsynchronousSettings, job: Job, listener: Listener,
        num_servers: int, newest: int,
    ) -> None:  # fmt: skip
        self.evaluation: dict[str, float] = {}
        self.saved: tuple[int, Path] | None = None
        self.ending = False
        self._inspection, self._settings, self._job, self._listener = inspection, settings, job, listener
        self._num_servers = num_servers
        self.newest = newest
        self._waiting: deque[int] = deque()
        self._running: _InspectionThread | None = None

    def add(self, version: int) -> None:
        """All servers have this snapshot, which is to be evaluated or saved."""
        if version > self.newest:
            self.newest = version
            self._waiting.append(version)

    def advance(self, directory: Path) -> bool:
        """Report what an ended thread found, and start the next; whether one runs. directory: of the run."""
        if self._running is not None and not self._running.is_alive():
            ended, self._running = self._running, None
            ended.join()
            if ended.error is not None:
                raise ended.error
            if ended.evaluation is not None:
                self.evaluation = ended.evaluation
                self._listener.evaluated(ended.version, ended.evaluation)
            if ended.saved is not None:
                self.saved = ended.version, ended.saved
                self._listener.saved(ended.version, ended.saved)
        if self._running is None and self._waiting:
            version = self._waiting.popleft()
            paths = [due_path(directory, version, server) for server in range(self._num_servers)]
            evaluates = self._settings.evaluates(self._job, version) and not self.ending
            saves = self._settings.saves(self._job, version) or self.ending
            self._running = _InspectionThread(self._inspection, version, paths, evaluates, saves)
            self._running.start()
        return self._running is not None


class _InspectionThread(threading.Thread):
    """Of the snapshot of update `version`. paths: of its files, by server; they are removed."""

    def __init__(
        self, inspection: Inspection, version: int, paths: Sequence[Path], evaluates: bool, saves: bool
    ) -> None:
        super().__init__(daemon=True)  # a run that ends early does not wait for it
        self.version = version
        self.evaluation: dict[str, float] | None = None
        self.saved: Path | None = None
        self.error: BaseException | None = None
        self._inspection, self._paths = inspection, paths
        self._evaluates, self._saves = evaluates, saves

    def run(self) -> None:
        try:
            snapshots = [read_snapshot(path) for path in self._paths]
            contents = [content for _, content in snapshots]
            if self._evaluates:
                self.evaluation = self._inspection.evaluate(contents, self.version)
            if self._saves:
                self.saved = self._inspection.save(self.version, contents, snapshots[0][0])
            for path in self._paths:
                path.unlink()
        except BaseException as error:
            self.error = error
