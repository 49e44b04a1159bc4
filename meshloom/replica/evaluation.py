"""Evaluates the job's metrics over all replicas."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from meshloom.comm.steps import Steps
from meshloom.data.chunks import Chunk
from meshloom.replica.metrics import MetricSums
from meshloom.replica.replica import Replica
from meshloom.replica.trial_evaluation import naming


def evaluate(replica: Replica, chunks: Iterable[Chunk]) -> Steps[dict[str, float]]:
    """Mean of every metric over all replicas' chunks, in evaluation mode.

    Within a round of local steps it is the mean of the replicas' parameters that is evaluated; afterwards
    each goes on from its own.
    """
    if replica.exchange.settled:
        return (yield from _evaluate(replica, chunks))
    put_back = yield from replica.exchange.show_mean()
    try:
        yield from replica.engine.refresh_borrowed()
        values = yield from _evaluate(replica, chunks)
    finally:
        put_back()
    yield from replica.engine.refresh_borrowed()
    return values


def _evaluate(replica: Replica, chunks: Iterable[Chunk]) -> Steps[dict[str, float]]:
    assert replica.job.evaluate
    metrics = replica.job.evaluate.metrics
    tally = MetricSums(metrics, replica.seat.device)
    with replica.modes.evaluation(), torch.no_grad():
        for chunk in chunks:
            if not chunk.samples:
                continue
            data = replica.scope.data(chunk)
            for name, metric in metrics.items():
                with naming(name):
                    yield from replica.engine.evaluate(data, metric, partial(tally.add, name, chunk))
    yield from replica.engine.add_up("pp", tally.sums)
    if replica.plan.dp > 1:
        work = replica.replicas.all_reduce(tally.sums)
        yield
        work.wait()
    return tally.means()
