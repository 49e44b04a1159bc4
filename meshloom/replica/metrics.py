"""Evaluates the job's metrics: means over the chunks of all replicas, as sums that add up over ranks, and those of all samples together, which
are gathered on rank 0."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from meshloom.comm.group import Group
from meshloom.comm.objects import gather_objects, on_rank_0, share
from meshloom.core.errors import CaptureError, JobError, MeshloomError
from meshloom.core.job import LossFunction
from meshloom.core.job_functions import Metric
from meshloom.core.losses.all_samples import ComputeError, Whole, checked_samples, computed
from meshloom.core.losses.loss_sum import as_sum
from meshloom.data.chunks import Chunk
from meshloom.exchange.local_sgd import within_round
from meshloom.replica.replica import Replica
from meshloom.replica.replica_state import show_averages
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


def evaluate(
    replica: Replica, chunks: Iterable[Chunk], updates: int, *, trial: bool = False
) -> dict[str, float]:  # fmt: skip
    """Every metric over all replicas' chunks, in evaluation mode, after `updates` updates. If the job keeps averages
    of its parameters, these are evaluated. trial: on less than all data, on which a `Metric` may not be defined: what its `compute` raises is a note.

    Within a round of local steps the mean of the replicas' parameters is evaluated; afterwards each replica
    continues from its own.
    """
    averages = replica.updater.state.averages if replica.updates else None
    if averages and averages.started:
        put_back = show_averages(replica, averages)
        replica.updating = replica.plan.dp > 1  # until what this rank does not own is back, too
        try:
            replica.engine.refresh_borrowed()
            values = _evaluate(replica, chunks, updates, trial=trial)
        finally:
            put_back()
        averages.publish()
        replica.engine.refresh_borrowed()
        replica.updating = False
        return values
    rounds = within_round(replica.exchange)
    if rounds is None:
        return _evaluate(replica, chunks, updates, trial=trial)
    put_back = rounds.show_mean()
    try:
        replica.engine.refresh_borrowed()
        values = _evaluate(replica, chunks, updates, trial=trial)
    finally:
        put_back()
    replica.engine.refresh_borrowed()
    return values


def _evaluate(
    replica: Replica,
    chunks: Iterable[Chunk],
    updates: int,
    *,
    trial: bool,
) -> dict[str, float]:
    given = replica.job.evaluate
    assert given
    metrics = given.functions
    sums = MetricSums([name for name, each in given.metrics.items() if not isinstance(each, Metric)], replica.context.device)  # fmt: skip
    samples = {name: AllSamples(name, each) for name, each in given.metrics.items() if isinstance(each, Metric)}  # fmt: skip
    place = replica.context.place
    speaks = not place.tp  # for its replica
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
                of_all = samples.get(name)
                with naming(name), untouched():
                    take = partial(of_all.add, chunk) if of_all else partial(sums.add, name, chunk)
                    replica.engine.evaluate(data, metric, moment, take)
    if sums.sums.numel():
        replica.engine.team_sums.add_up("pp", sums.sums)
    if sums.sums.numel() and replica.plan.dp > 1:
        replica.replicas.all_reduce(sums.sums).wait()
    values = sums.means()
    for name, of_all in samples.items():
        values[name], note = of_all.computed(replica.context.world, speaks=speaks, trial=trial)
        replica.scope.notes += [note] if note and replica.context.world.rank == 0 else []
    return {name: values[name] for name in given.metrics}


class MetricSums:
    """sums: each metric's values and their weights; float64 [metrics, 2]."""

    def __init__(self, metrics: Collection[str], device: torch.device) -> None:
        self.sums = torch.zeros(len(metrics), 2, dtype=torch.float64, device=device)
        self._rows = dict(zip(metrics, self.sums, strict=True))

    def add(self, name: str, chunk: Chunk, returned: Any) -> None:
        """Add what a metric returned for a chunk: a scalar tensor or a number, or (sum, weight)."""
        value, weight = as_sum(_as_tensor(returned), chunk.samples, needs_gradient=False, who="The metric")
        for place, each in zip(self._rows[name], (value, weight), strict=True):
            place += each  # of a device, or a plain number, for which nobody waits

    def means(self) -> dict[str, float]:
        """By name; nan where there is no weight."""
        return {
            name: total / weight if weight else math.nan
            for name, (total, weight) in zip(self._rows, self.sums.tolist(), strict=True)
        }


class AllSamples:
    """What a `Metric` returns for the chunks of one rank."""

    def __init__(self, name: str, metric: Metric) -> None:
        self._name, self._metric = name, metric
        self._chunks: list[tuple[int, int, Whole]] = []  # batch, number of the chunk

    def add(self, chunk: Chunk, returned: Any) -> None:
        """Add what `update` returned for a chunk."""
        self._chunks.append((chunk.step, chunk.index, checked_samples(returned, chunk.samples)))

    def computed(self, world: Group, *, speaks: bool, trial: bool) -> tuple[float, str]:
        """Its value, on every rank, and a note; collective. speaks: whether this rank's chunks count, which others have, too."""
        everyone = gather_objects(world, self._chunks if speaks else [])
        self._chunks = []

        def compute() -> tuple[float, str]:
            chunks = [each for of_rank in everyone for each in of_rank]
            chunks.sort(key=lambda each: each[:2])
            with naming(self._name):
                try:
                    return computed(self._metric, [whole for _, _, whole in chunks]), ""
                except ComputeError as error:
                    if not trial:
                        raise
                    why = str(error).rstrip(".")
                    return (
                        math.nan,
                        f"Metric {self._name!r}, tried on a part of the data: {why}. Evaluations call it with all samples.",
                    )

        found = on_rank_0(world, compute, JobError)
        value, note = share(world, found)
        return value, note


def expected_bytes(metrics: Mapping[str, LossFunction | Metric]) -> ExpectedBytes:
    """Of an evaluation over several replicas. What is gathered of samples goes over the ranks' control group, as decisions do."""
    means = [each for each in metrics.values() if not isinstance(each, Metric)]
    return ExpectedBytes(per_evaluation=Traffic.along("dp", all_reduce=16 * len(means)))


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
