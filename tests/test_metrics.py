"""Means of metrics: of samples as of other weights, over any division of the chunks among ranks."""

from __future__ import annotations

import math

import torch

from meshloom.state.chunks import Chunk
from meshloom.state.metrics import MetricSums

CPU = torch.device("cpu")
METRICS = {"loss": lambda model, batch: batch, "tokens": lambda model, batch: batch}


def chunk(index: int, samples: int) -> Chunk:
    return Chunk(step=0, index=index, samples=samples, batch=10, data=None)


def test_means_of_uneven_chunks_are_those_of_all_samples():
    values = torch.randn(10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = torch.arange(10, dtype=torch.float64)
    ranks = [MetricSums(METRICS, CPU) for _ in range(2)]
    for index, part in enumerate([slice(0, 5), slice(5, 7), slice(7, 10)]):
        here = chunk(index, len(values[part]))
        ranks[index % 2].add("loss", here, values[part].mean())
        ranks[index % 2].add("tokens", here, ((values * weights)[part].sum(), weights[part].sum()))
    ranks[0].sums += ranks[1].sums
    found = ranks[0].means()
    assert list(found) == list(METRICS)
    assert math.isclose(found["loss"], float(values.mean()), rel_tol=1e-14)  # another order of the sum
    assert math.isclose(found["tokens"], float((values * weights).sum() / weights.sum()), rel_tol=1e-14)


def test_mean_of_nothing_is_no_number():
    sums = MetricSums(METRICS, CPU)
    sums.add("loss", chunk(0, 2), torch.tensor(3.0))
    found = sums.means()
    assert found["loss"] == 3.0 and math.isnan(found["tokens"])
