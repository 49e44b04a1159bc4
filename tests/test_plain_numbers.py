"""Numbers in attributes of modules follow the rule of buffers (docs/buffers.md)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshloom as ml
from meshloom.core.errors import TrainingError
from meshloom.telemetry.progress import QUIET
from meshloom.verify.run import verify
from tests.zoo import integers, job_of, normal

pytestmark = pytest.mark.usefixtures("silent_export")
DATA = {"x": normal(1, 7), "y": integers(2, 5)}


class Annealed(nn.Module):
    """A temperature that falls with every forward, every other of which is scaled, and the most that it has seen."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(7, 9), nn.Linear(9, 5)
        self.calls, self.temperature, self.most = 0, 2.0, 0.0
        self.register_buffer("average", torch.zeros(9))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.one(x) / self.temperature)
        if self.training:
            self.calls += 1
            self.temperature = max(0.5, self.temperature * 0.7)
            self.most = max(self.most, float(h.detach().abs().max()))
            self.average.lerp_(h.detach().mean(0), 0.1)  # so that chunks are run again on other values
        return self.two(h * (2.0 if self.calls % 2 else 1.0) + self.average)


def job() -> ml.Job:
    return job_of(Annealed, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), DATA)


@pytest.mark.long
@pytest.mark.parametrize(
    "plan",
    [
        "dp=2,microbatches=2",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("pp=2,microbatches=2", "dp=2,tp=2", "dp=2,pp=2,tp=2,microbatches=2", "dp=2,zero=3")),
    ],
)  # fmt: skip
def test_chunks_find_them_as_they_were_before_the_step(plan: str) -> None:
    report = verify(job(), ml.Plan.parse(plan), devices="simulated", steps=3, dtype=torch.float64)
    assert report is not None
    assert report.passed, report.causes


def test_a_counter_counts_steps_on_every_replica_and_bytes_are_predicted() -> None:
    with ml.Trainer(job(), "dp=2,microbatches=2", devices="simulated", listener=QUIET) as trainer:
        trainer.fit()
        summary = trainer.summary(1.0, {}, None)
        models: list[Any] = [each.model for each in trainer.replicas]
    assert [each.calls for each in models] == [3, 3]
    assert [each.temperature for each in models] == [pytest.approx(2.0 * 0.7**3)] * 2
    assert models[0].most == models[1].most > 0
    assert summary.predicted == summary.counted


class Drawing(nn.Module):
    """A generator of its own, whose state is a whole number. bits: of the state."""

    def __init__(self, bits: int = 64) -> None:
        super().__init__()
        self.one, self.two, self.bits = nn.Linear(7, 9), nn.Linear(9, 5), bits
        self.state = 1

    def forward(self, x: Tensor) -> Tensor:
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**self.bits
        return self.two(torch.tanh(self.one(x))) * (1 + self.state / 2**self.bits)


def test_a_number_that_is_too_long_is_named() -> None:
    job = job_of(lambda: Drawing(200), lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), DATA)
    with (
        pytest.raises(
            TrainingError, match=r"a whole number of 1\d\d bits, and replicas send each other at most 127"
        ),
        ml.Trainer(job, "dp=2", devices="simulated", listener=QUIET) as trainer,
    ):
        trainer.fit()
