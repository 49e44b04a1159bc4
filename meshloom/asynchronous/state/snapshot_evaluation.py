"""Evaluates snapshots, which are of one version on all servers, and saves them as checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshloom.asynchronous.state.checkpoints import write_snapshot
from meshloom.asynchronous.state.parameters import Content
from meshloom.asynchronous.state.settings import AsynchronousSettings
from meshloom.asynchronous.state.worker_replica import WorkerReplica
from meshloom.checkpoint.writing.run_directory import open_directory
from meshloom.comm.simulated import simulated_groups
from meshloom.core.errors import CheckpointError, JobError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.random import preserved_draws_of_devices
from meshloom.data.chunks import Chunk
from meshloom.data.job_data import build_dataset, evaluation_chunks
from meshloom.replica.replica_state import check_saved


class Inspection:
    """replica: its model takes the values of the snapshot."""

    def __init__(self, job: Job, plan: Plan, settings: AsynchronousSettings, replica: WorkerReplica) -> None:
        self._job, self._plan, self._settings, self._replica = job, plan, settings, replica
        self._data: Any = None
        self._replaced: list[Path] = []  # an earlier run's checkpoints, until this run has its own

    def try_out(self) -> None:
        """Check that `out` can have the model, and that no checkpoint there is lost unasked, and evaluate one batch."""
        group, settings = simulated_groups(1)[0], self._settings
        if settings.out is not None:
            check_saved(self._replica.model)
        self._replaced = open_directory(
            settings.out, group, resume=settings.resume, overwrite=settings.overwrite
        )
        if self._job.evaluate is not None:
            with preserved_draws_of_devices():
                self._replica.evaluate(self._chunks(num_batches=1), 0, trial=True)

    def load(self, contents: Sequence[Content | None]) -> None:
        """Load the values of a snapshot, by server."""
        there = [content for content in contents if content is not None]
        if there:  # else no update is done yet: the model is as the job built it
            self._replica.whole_model.load([content.values for content in there], there[0].buffers)

    def evaluate(self, contents: Sequence[Content | None], version: int) -> dict[str, float]:
        """Every metric of the job's `Evaluate` over all of its data, after `version` updates."""
        if self._job.evaluate is None:
            raise JobError(
                "This job has nothing to evaluate. Give it evaluate=Evaluate(data, metrics, every)."
            )
        self.load(contents)
        return self._replica.evaluate(self._chunks(), version)

    def save(self, version: int, contents: Sequence[Content], state: Any) -> Path:
        """Write a checkpoint into `out`; its path. state: the head's."""
        if self._settings.out is None:
            raise CheckpointError(
                "There is nowhere to save to. Give Trainer(out=DIRECTORY), or --out DIRECTORY."
            )
        self.load(contents)
        path = write_snapshot(
            self._settings.out,
            version,
            contents,
            state,
            self._replica.model,
            self._job,
            self._plan,
            self._replaced,
        )
        self._replaced = []
        return path

    def _chunks(self, num_batches: int | None = None) -> Iterator[Chunk]:
        assert self._job.evaluate is not None
        if self._data is None:
            self._data = build_dataset(self._job.evaluate.data, self._job.seed)
        group = simulated_groups(1)[0]
        return evaluation_chunks(self._data, self._job, Plan(), group, num_batches=num_batches)
