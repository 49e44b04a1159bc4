"""Evaluation of a job's metrics by all replicas together, over all data or over one batch as a trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from meshloom.comm.objects import share
from meshloom.core.errors import JobError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.random import preserved_draws_of_devices
from meshloom.data.chunks import Chunk
from meshloom.data.job_data import build_dataset, evaluation_chunks
from meshloom.data.shares import Shares
from meshloom.replica.metrics import evaluate
from meshloom.replica.replica import Replica
from meshloom.telemetry.best_metric import BestMetric
from meshloom.telemetry.timings import Timings
from meshloom.train.local_replicas import LocalReplicas
from meshloom.train.step_meter import StepMeter


class TeamEvaluation:
    """Replicas read the evaluation data in the proportions of their shares of a batch. best: of the metric that the job
    goes by, as far as `fit()` has come. newest: metrics as each replica of this process has them. timings: are told how many batches of
    an evaluation have been read."""

    def __init__(
        self, job: Job, plan: Plan, shares: Shares, replicas: LocalReplicas, meter: StepMeter, timings: Timings,
    ) -> None:  # fmt: skip
        self._job, self._plan, self._shares, self._replicas, self._meter = job, plan, shares, replicas, meter
        self._timings = timings
        self._data: Any = None
        given = job.evaluate
        self.best = BestMetric.of(given.best, given.patience) if given and given.best else None
        self._tried = False
        self.newest: list[dict[str, float]] = []
        self._most: int | None = None

    @contextmanager
    def of_first(self, most: int | None) -> Iterator[None]:
        """A context in which `evaluate` is of so many batches at most; None: of all."""
        self._most = most
        try:
            yield
        finally:
            self._most = None

    @property
    def num_batches(self) -> int:
        """Of all of the data, once it has been evaluated or tried out; else 0."""
        return -(-len(self._data) // self._job.evaluation_batch_size) if self._data is not None else 0

    def evaluate(
        self, next_step: int, num_batches: int | None = None, *, due: bool = False
    ) -> dict[str, float]:
        """Every metric, averaged over all of its data or its first batches. next_step: steps done. due: whether schedulers that go by one are
        stepped."""
        self.newest = self.evaluate_each(next_step, num_batches or self._most)
        if due:
            self.step_schedulers(self.newest[0])
        return self.newest[0]

    def evaluate_each(self, next_step: int, num_batches: int | None = None) -> list[dict[str, float]]:
        """The same, as each replica of this process has it."""
        if self._job.evaluate is None:
            raise JobError(
                "This job has nothing to evaluate. Give it evaluate=Evaluate(data, metrics, every)."
            )
        replicas = self._replicas
        replicas.enter("evaluating", next_step)
        if self._data is None:
            self._data = build_dataset(self._job.evaluate.data, self._job.seed)
        shares = self._shares.of(max(next_step - 1, 0))
        chunks = [
            evaluation_chunks(self._data, self._job, self._plan, replica.context.readers, shares, num_batches)
            for replica in replicas.all
        ]
        chunks[0] = self._counted(chunks[0], num_batches)
        self._meter.evaluations += 1
        with replicas.computing():
            values = replicas.together(
                lambda each: evaluate(
                    each,
                    chunks[replicas.all.index(each)],
                    next_step,
                    trial=num_batches is not None,
                )
            )
        replicas.enter("between steps", next_step)
        return values

    def step_schedulers(self, metrics: Mapping[str, float]) -> None:
        """After an evaluation: those that go by a metric. metrics: of this process's first rank."""
        if self._replicas.first.updater.by_metric:
            self._replicas.together(partial(_step_schedulers, metrics=metrics))

    def _counted(self, chunks: Iterator[Chunk], num_batches: int | None) -> Iterator[Chunk]:
        of = min(num_batches or self.num_batches, self.num_batches)
        for chunk in chunks:
            self._timings.counted(chunk.step, of)
            yield chunk

    def try_out(self, next_step: int) -> None:
        """Evaluate all metrics on one batch, once, so that mistakes in them show before the first step."""
        if self._job.evaluate is None or self._tried:
            return
        self._tried = True
        with preserved_draws_of_devices():
            self.evaluate(next_step, num_batches=1)


def _step_schedulers(replica: Replica, metrics: Mapping[str, float]) -> None:
    """With the values of rank 0, so that a last bit cannot make ranks decide differently."""
    of_first = share(replica.context.world, dict(metrics))
    given = replica.job.evaluate
    assert given is not None and given.scheduler is not None
    for scheduler in replica.updater.by_metric:
        scheduler.step(given.scheduler.value(of_first))
