"""`meshloom.step()` is an input of programs: what a loss computes of it is the same in every step as on one device."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshloom as ml
from meshloom.core.errors import CaptureError
from meshloom.core.job import Evaluate, Job
from meshloom.data.samples import first_batches
from meshloom.program.ir.step_input import STEP
from meshloom.program.store.captured_loss import CapturedLoss
from meshloom.train.trainer import Trainer
from tests.covering import slow
from tests.jobs import make_job
from tests.verified import equals_one_device

pytestmark = pytest.mark.usefixtures("silent_export")
STEPS = 5


def annealed(model: Any, batch: Any) -> Tensor:
    """Python's arithmetic, min and max, torch's functions, and a choice."""
    found, step = model(batch["x"]), ml.step()
    weight = min(1.0, step / 3) + max(0.1, 1 - 0.25 * step) + 0.5**step + (step % 2) * 0.01 + step // 2 * 0.02
    cosine = torch.cos(torch.as_tensor(math.pi * step / STEPS))
    late = torch.where(torch.as_tensor(step > 2), found.abs().mean(), found.square().mean())
    return F.cross_entropy(found, batch["y"]) + 0.1 * weight * late + 0.01 * cosine * found.mean()


class Dims(nn.Module):
    """In a module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(7, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x)) * (1 + ml.step() / 10))


def job_of(loss: Any = annealed, model: Any = Dims, **settings: Any) -> Job:
    return replace(make_job("mlp", "sgd"), model=model, loss=loss, steps=STEPS, **settings)


def losses(job: Job, plan: str) -> list[float]:
    with Trainer(job, plan, devices="simulated") as trainer:
        return [trainer.step(batch) for batch in trainer.batches()]


@pytest.mark.parametrize(
    "plan",
    [pytest.param("tp=2", marks=pytest.mark.long), *map(slow, ("pp=2", "dp=2,recompute=full"))],
)
def test_every_step_has_its_own_number(plan: str) -> None:
    # rounding: Python computes what is beside it in doubles, and so does the input
    assert losses(job_of(), plan) == pytest.approx(losses(job_of(), "dp=1"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tp=2", "pp=2,microbatches=2", "dp=2,pp=2,tp=2"])
def test_it_equals_one_device_in_metrics_too(plan: str) -> None:
    metrics = {"risen": lambda model, batch: model(batch["x"]).mean() * min(1.0, ml.step() / 2)}
    job = job_of(evaluate=Evaluate(data=make_job("mlp", "sgd").data, metrics=metrics, every=2))
    equals_one_device(job, plan, steps=3, dtype=None)


@pytest.mark.long
def test_it_is_an_input_where_it_is_used() -> None:
    def inputs(loss: Any, model: Any) -> list[str]:
        job = job_of(loss, model)
        return [each.name for each in CapturedLoss(job).capture(first_batches(job, 2, 6)).inputs]

    assert inputs(annealed, Dims) == ["x", "y", STEP]
    assert inputs(make_job("mlp", "sgd").loss, make_job("mlp", "sgd").model) == ["x", "y"]


NEEDS_IT = {
    "a function of Python's": lambda found, step: found * math.cos(step),
    "a condition": lambda found, step: found if step > 100 else 2 * found,
    "an index": lambda found, step: found[:, : int(step) + 1],
}


@pytest.mark.parametrize("name", NEEDS_IT)
def test_where_the_number_itself_is_needed_it_is_refused(name: str) -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        return NEEDS_IT[name](model(batch["x"]), ml.step()).mean()

    with pytest.raises(
        CaptureError, match=r"test_step_input.py:\d+ .*meshloom.step\(\), which is a tensor here"
    ) as refused:
        Trainer(job_of(loss), "tp=2", devices="simulated")
    assert refused.value.exit_code == 2


class Late(nn.Module):
    """A leaf finds the number itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if ml.step() > 2 and x.sum() < 1e9 else x


@pytest.mark.slow
def test_a_leaf_has_the_number() -> None:
    class Model(Dims):
        def __init__(self) -> None:
            super().__init__()
            self.late = Late()

        def forward(self, x: Tensor) -> Tensor:
            return self.late(super().forward(x))

    assert losses(job_of(model=Model), "tp=2") == pytest.approx(losses(job_of(model=Model), "dp=1"), rel=1e-5)


@pytest.mark.long
def test_builtins_are_pythons_again() -> None:
    CapturedLoss(job_of()).capture(first_batches(job_of(), 2, 6))
    assert min.__module__ == max.__module__ == "builtins" and min(random.sample(range(9), 9)) == 0
