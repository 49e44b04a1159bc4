"""Hidden states and memories that forwards leave in attributes for the next step: rows of a batch go on with their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from meshloom.core.job import Evaluate, Job
from meshloom.core.modules.carried_attributes import carrying_places
from meshloom.core.plan import Plan
from meshloom.train.trainer import Trainer
from meshloom.verify.run import verify
from tests.zoo import integers, job_of, normal, sgd


class Recurrent(nn.Module):
    """ids [n, t] -> [n, t, 31]. Trained over consecutive parts of texts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.out = (
            nn.Embedding(31, 6),
            nn.LSTM(6, 9, batch_first=True),
            nn.Linear(9, 31),
        )
        self.hidden: tuple[Tensor, Tensor] | None = None
        self.norm: Tensor | None = None  # set alone

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.hidden if self.training else None
        out, (h, c) = self.lstm(self.embedding(ids), hidden)
        self.hidden = (h.detach(), c.detach())
        self.norm = out.norm()
        return self.out(out)


class Remembering(nn.Module):
    """x [n, 5] -> [n, 3]. A memory of the last two segments, in a list, that is absent before the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        memory = getattr(self, "memory", None) or []
        self.memory = [*memory, h.detach()][-2:]
        return self.second(h + sum(memory) if memory else h)


def cross_entropy(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def recurrent() -> Job:
    samples = list(integers(5, 31, 8))
    evaluate = Evaluate(data=lambda: samples[:12], metrics={"loss": cross_entropy}, every=1)
    return job_of(Recurrent, cross_entropy, samples, optimizer=sgd, shuffle=False, evaluate=evaluate)


def remembering() -> Job:
    return job_of(Remembering, lambda model, x: model(x).square().mean(), list(normal(6, 5)), optimizer=sgd)


PLANS = ["dp=2", "dp=2,zero=3,microbatches=2", "tp=2", "pp=2,microbatches=2"]


@pytest.mark.covering(
    "dp=2-recurrent",
    "zero=3,microbatches=2-remembering",
    "tp=2-remembering",
    "pp=2,microbatches=2-remembering",
)
@pytest.mark.parametrize("job", [recurrent, remembering])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.usefixtures("silent_export")
@pytest.mark.slow
def test_a_job_equals_one_device_on_the_whole_batch(job: Callable[[], Job], plan: str):
    """Replicas began with nothing; programs found nothing in every step."""
    report = verify(job(), Plan.parse(plan), devices="simulated", steps=3, dtype=torch.float64)
    assert report is not None and report.passed, str(report)
    assert report.whole is not None and report.whole.error < 1e-10


@pytest.mark.usefixtures("silent_export")
def test_a_state_matters():
    """Without it losses are others."""
    assert _losses(recurrent()) != pytest.approx(
        _losses(dataclasses.replace(recurrent(), model=_Forgetful)), rel=1e-4
    )


class _Forgetful(Recurrent):
    def forward(self, ids: Tensor) -> Tensor:
        self.hidden = None
        return super().forward(ids)


def test_attributes_that_are_read_and_set():
    model = nn.ModuleDict({"a": Recurrent(), "b": Remembering(), "c": nn.LSTM(3, 3)})
    assert [(path, name) for path, _, name in carrying_places(model)] == [("a", "hidden"), ("b", "memory")]


def _losses(job: Job) -> list[float]:
    with Trainer(job, "dp=1", devices="simulated") as trainer:
        return [trainer.step(batch) for batch in trainer.batches()]
