"""The log of a Trainer's run: what its listener hears, and what only the run itself knows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.replica.replica import Replica
from meshloom.telemetry.progress import Listener, all_of
from meshloom.telemetry.run_log import RunLog
from meshloom.telemetry.summary import Summary
from meshloom.train.log.run_start import WhereItRuns, division_values, memory_values, start_values


class TrainingLog:
    """In directory `out`, of the process that reports. goes_on: whether the run resumes an earlier one."""

    def __init__(self, out: Path, *, goes_on: bool) -> None:
        self._replicas = list[Replica]()
        self._log = RunLog(out, goes_on=goes_on)

    def beside(self, listener: Listener) -> Listener:
        """A listener that also writes what it hears."""
        log = self._log.listener()
        log.ended = self._end
        return all_of([log, listener])

    def start(
        self,
        job: Job,
        plan: Plan,
        devices: WhereItRuns,
        replicas: Sequence[Replica],
        *,
        steps: int,
        step: int,
    ) -> None:
        """Once the run is ready. replicas: of this process. steps: of the whole run. step: those that were done before.
        Raises `ReportError`."""
        self._replicas = list(replicas)
        self._log.start(**start_values(job, plan, devices, steps=steps, step=step))
        if replicas:
            self._log.write("division", **division_values(replicas[0]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._log.close()

    def _end(self, summary: Summary) -> None:
        if self._replicas and summary.steps:
            self._log.write("memory", **memory_values(self._replicas[0]))
        self._log.end(summary)
