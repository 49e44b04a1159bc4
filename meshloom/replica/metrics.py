"""Evaluates the job's metrics: means over the chunks of all replicas, as sums that add up over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from meshloom.comm.steps import Steps
from meshloom.core.errors import CaptureError, JobError, MeshloomError
from meshloom.core.job import LossFunction
from meshloom.core.losses.loss_sum import as_sum
from meshloom.data.chunks import Chunk
from meshloom.pipeline.runtime.microbatches import Visit
from meshloom.replica.replica import Replica
from meshloom.replica.replica_state import show_averages
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class EvaluationObserver(Protocol):
    """Observes an evaluation on one rank, for verification: it adds to it, and takes the place of nothing."""

    def metric(
        self, chunk: Chunk, name: str, data: Any, sums: Tensor
    ) -> AbstractContextManager[Visit | None]:
        """Context around a metric of a chunk. data: its batch on the computing device. sums: float64 [2], the metric's value and
        weight on this rank so far, to which this chunk's are added within. Yields what sees the values of programs."""
        ...


def evaluate(
    replica: Replica, chunks: Iterable[Chunk], updates: int, observer: EvaluationObserver | None = None
) -> Steps[dict[str, float]]:
    """Mean of every metric over all replicas' chunks, in evaluation mode, after `updates` updates. If the job keeps averages
    of its parameters, these are evaluated.

    Within a round of local steps the mean of the replicas' parameters is evaluated; afterwards each replica
    continues from its own.
    """
    averages = replica.updater.state.averages if replica.updates else None
    if averages and averages.started:
        put_back = yield from show_averages(replica, averages)
        replica.updating = replica.plan.dp > 1  # until what this rank does not own is back, too
        try:
            yield from replica.engine.refresh_borrowed()
            values = yield from _evaluate(replica, chunks, updates, observer)
        finally:
            put_back()
        yield from averages.publish()
        yield from replica.engine.refresh_borrowed()
        replica.updating = False
        return values
    if replica.exchange.settled:
        return (yield from _evaluate(replica, chunks, updates, observer))
    put_back = yield from replica.exchange.show_mean()
    try:
        yield from replica.engine.refresh_borrowed()
        values = yield from _evaluate(replica, chunks, updates, observer)
    finally:
        put_back()
    yield from replica.engine.refresh_borrowed()
    return values


def _evaluate(
    replica: Replica, chunks: Iterable[Chunk], updates: int, observer: EvaluationObserver | None
) -> Steps[dict[str, float]]:
    assert replica.job.evaluate
    metrics = replica.job.evaluate.metrics
    sums = MetricSums(metrics, replica.context.device)
    with (
        replica.modes.evaluation(), torch.no_grad(), replica.engine.computing("evaluate"),
        replica.scope.evaluating() as untouched,
    ):  # fmt: skip
        for chunk in chunks:
            if not chunk.samples:
                continue
            data, moment = replica.scope.data(chunk), replica.scope.evaluation(chunk, updates)
            for name, metric in metrics.items():
                replica.scope.seed(moment)
                around = observer.metric(chunk, name, data, sums.of(name)) if observer else nullcontext()
                with naming(name), untouched(), around as visit:
                    take = partial(sums.add, name, chunk)
                    yield from replica.engine.evaluate(data, metric, moment, take, visit)
    yield from replica.engine.add_up("pp", sums.sums)
    if replica.plan.dp > 1:
        work = replica.replicas.all_reduce(sums.sums)
        yield
        work.wait()
    return sums.means()


class MetricSums:
    """sums: each metric's values and their weights; float64 [metrics, 2]."""

    def __init__(self, metrics: Mapping[str, LossFunction], device: torch.device) -> None:
        self.sums = torch.zeros(len(metrics), 2, dtype=torch.float64, device=device)
        self._rows = dict(zip(metrics, self.sums, strict=True))

    def add(self, name: str, chunk: Chunk, returned: Any) -> None:
        """Add what a metric returned for a chunk: a scalar tensor or a number, or (sum, weight)."""
        value, weight = as_sum(_as_tensor(returned), chunk.samples, needs_gradient=False, who="The metric")
        for place, each in zip(self._rows[name], (value, weight), strict=True):
            place += each  # of a device, or a plain number, for which nobody waits

    def of(self, name: str) -> Tensor:
        """The sums of one metric: value, weight."""
        return self._rows[name]

    def means(self) -> dict[str, float]:
        """By name; nan where there is no weight."""
        return {
            name: total / weight if weight else math.nan
            for name, (total, weight) in zip(self._rows, self.sums.tolist(), strict=True)
        }


def expected_bytes(metrics: Mapping[str, LossFunction]) -> ExpectedBytes:
    """Of an evaluation over several replicas."""
    return ExpectedBytes(per_evaluation=Traffic.along("dp", all_reduce=16 * len(metrics)))


def _as_tensor(returned: Any) -> Any:
    if isinstance(returned, tuple) and len(returned) == 2:
        return _as_tensor(returned[0]), returned[1]
    return torch.tensor(returned, dtype=torch.float64) if isinstance(returned, int | float) else returned


@contextmanager
def naming(metric: str) -> Iterator[None]:
    """Names the metric in errors of its computation."""
    try:
        yield
    except (JobError, CaptureError) as error:
        raise type(error)(f"Metric {metric!r}: {error}") from error
    except MeshloomError:
        raise
    except Exception as error:
        raise JobError(
            f"Metric {metric!r} of Evaluate failed with {type(error).__name__}: {error}"
        ) from error
