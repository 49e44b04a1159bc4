"""The readers of this process's replicas, which give their shares of every global batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from meshloom.core.errors import JobError, TrainingError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.data.chunks import Reader
from meshloom.data.job_data import open_reader
from meshloom.data.map_data import Batches
from meshloom.data.shares import Shares
from meshloom.data.team_data import open_team_reader
from meshloom.replica.replica import Replica
from meshloom.train.contract import Batch
from meshloom.train.local_replicas import LocalReplicas

_LOOP = "for batch in trainer.batches(): loss = trainer.step(batch)"


class BatchReaders:
    """Of a run of `steps`. phase: the context of what is timed under a name."""

    def __init__(
        self, job: Job, plan: Plan, shares: Shares, replicas: LocalReplicas, phase: Callable[[str], AbstractContextManager[None]], *, steps: int
    ) -> None:  # fmt: skip
        self._job, self._plan, self._shares, self._replicas = job, plan, shares, replicas
        self._phase, self._steps = phase, steps
        self._readers: list[Reader] = []

    def open(self, start: int) -> None:
        """Before step `start`. All ranks call it."""
        self._replicas.enter("reading", start)
        with self._phase("data"):
            self._readers = self._replicas.together(lambda replica: self._open(replica, start))

    @property
    def steps_per_epoch(self) -> int | None:
        """Once they are open; None: of a stream, whose length is unknown."""
        num_samples = self._readers[0].num_samples if self._readers else None
        return None if num_samples is None else Batches(self._job, num_samples).per_epoch

    def read(self, step: int) -> Batch:
        """The batch of that step, which is the next one. All ranks call it."""
        replicas = self._replicas
        replicas.enter("reading", step)
        with self._phase("data"):
            shares = replicas.together(lambda replica: self._readers[replicas.all.index(replica)].read(step))
        replicas.enter("between steps", step)
        return Batch(step, shares)

    def check(self, batch: Batch, step: int) -> None:
        """Raise an error unless it is the batch of that step, for these replicas."""
        if not isinstance(batch, Batch):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise JobError(
                f"Trainer.step takes a batch that Trainer.batches() gave, not a {type(batch).__name__}. Write: {_LOOP}."
            )
        here = len(self._replicas.all)
        if len(batch.shares) != here:
            raise JobError(
                f"This batch is for {len(batch.shares)} ranks in this process, and here are {here}. Write: {_LOOP}."
            )
        if batch.step != step:
            raise TrainingError(
                f"This is the batch of step {batch.step + 1}, and the next step is {step + 1}: each batch is trained once, in order. Write: {_LOOP}."
            )

    def close(self) -> None:
        """End reader processes."""
        for reader in self._readers:
            reader.close()
        self._readers = []

    def _open(self, replica: Replica, start: int) -> Reader:
        context = replica.context
        if context.team is None:
            return open_reader(self._job, self._plan, context.readers, start, self._steps, self._shares)
        return open_team_reader(
            self._job, self._plan, context.readers, context.team, start, self._steps, self._shares
        )
