"""Means of metrics: of samples as of other weights, over any division of the chunks among ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from meshloom.core.errors import JobError, MeshloomError
from meshloom.core.job import Evaluate
from meshloom.data.chunks import Chunk
from meshloom.replica.metrics import MetricSums
from meshloom.train.trainer import Trainer
from tests.jobs import make_job

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


def test_plain_numbers_are_as_good_as_tensors():
    """`.item()` at the end of a metric was refused, with "The loss function returned a float"."""
    sums = MetricSums(METRICS, CPU)
    sums.add("loss", chunk(0, 3), 0.25)
    sums.add("tokens", chunk(0, 3), (3, 4))
    assert sums.means() == {"loss": 0.25, "tokens": 0.75}


def test_a_plain_number_is_added_up_where_the_others_are():
    """It became a tensor on the CPU, and was added to sums on a GPU. Fake tensors have devices that the
    machine need not have."""
    with FakeTensorMode():
        sums = MetricSums(METRICS, torch.device("cuda"))
        sums.add("loss", chunk(0, 4), 0.5)
        sums.add("tokens", chunk(0, 4), (torch.ones((), device="cuda"), 4))
        assert sums.sums.device.type == "cuda"


def test_what_a_metric_must_not_return_is_said_of_the_metric():
    sums = MetricSums(METRICS, CPU)
    with pytest.raises(
        JobError,
        match=r"The metric returned a str\. Return one scalar tensor \(the mean over the samples\), or \(sum, weight\)\.$",
    ):
        sums.add("loss", chunk(0, 2), "good")


@pytest.mark.parametrize("plan", ["dp=2", "pp=2"])
@pytest.mark.slow
def test_a_metric_that_returns_no_number_is_named(plan: str):
    """It was called the loss, and under pp "a line that could not be found: new(): invalid data type
    'str'"."""
    job = make_job("mlp", "sgd", steps=2)
    job = replace(job, evaluate=Evaluate(job.data, {"accuracy": lambda model, batch: "good"}, 1))
    with (
        Trainer(job, plan, devices="simulated") as trainer,
        pytest.raises(MeshloomError, match=r"Metric 'accuracy': The .*metric returned a str\. Return"),
    ):
        trainer.evaluate()
