"""`random`, numpy and `meshloom.step()` in forwards, losses and metrics: one device and all replicas draw alike, and programs in leaves that are
named; elsewhere they are refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from jobs import vectors
from torch import Tensor, nn
from torch.nn import functional as F

import meshloom as ml
from meshloom.core.errors import CaptureError, JobError
from meshloom.core.job import Evaluate, Job
from meshloom.replica.replica_state import full_state
from meshloom.train.trainer import Trainer
from tests.jobs import class_loss
from tests.verified import equals_one_device

STEPS = 4
EAGER = ["dp=2", "dp=2,zero=1", "dp=2,zero=3"]


class Noisy(nn.Module):
    """Draws with `random` before and with numpy after a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x * (1 - random.random())).relu()
        return self.second(
            x + torch.from_numpy(numpy.random.standard_normal(6)).to(x.device) * numpy.random.beta(0.4, 0.7)
        )


def mixup(model: nn.Module, batch: Any) -> Tensor:
    """As its paper has it, with a weight that is annealed over steps."""
    x, y = batch["x"], batch["y"]
    share = numpy.random.beta(0.3, 0.3)
    order = numpy.random.permutation(len(x))
    found = model(share * x + (1 - share) * x[order])
    loss = share * F.cross_entropy(found, y) + (1 - share) * F.cross_entropy(found, y[order])
    return loss + 0.01 * ml.step() * found.square().mean()


def job_of(model: Any = Noisy, loss: Any = mixup, **overrides: Any) -> Job:
    settings: dict[str, Any] = {
        "model": lambda: model().double(),
        "loss": loss,
        "optimizer": lambda named: torch.optim.AdamW(named, lr=1e-2),
        "data": lambda: Doubles(),
        "batch_size": 12,
        "steps": STEPS,
    }
    return Job(**{**settings, **overrides})


class Doubles(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.fields = vectors().fields

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.fields["x"][index].double(), "y": self.fields["y"][index]}


def trained(job: Job, plan: str, **settings: Any) -> list[Tensor]:
    with Trainer(job, plan=plan, devices="simulated", **settings) as trainer:
        trainer.fit()
        whole = trainer.together(full_state)[0]
        return [each.clone().cpu() for each in whole.values()]


def check_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        # sums over chunks are in another order
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("plan", EAGER)
@pytest.mark.long
def test_one_device_and_all_replicas_draw_alike(plan: str) -> None:
    equals_one_device(job_of(), plan, steps=STEPS, dtype=None)


def test_the_users_generators_are_left_as_they_were() -> None:
    random.seed(3)
    numpy.random.seed(4)
    wanted = random.random(), numpy.random.random()
    with Trainer(job_of(), plan="dp=2", devices="simulated") as trainer:
        batches = iter(trainer.batches())
        batch = next(batches)
        random.seed(3)
        numpy.random.seed(4)
        trainer.step(batch)
        assert (random.random(), numpy.random.random()) == wanted


@pytest.mark.long
def test_the_step_is_exact_after_a_resume(tmp_path: Path) -> None:
    job = job_of(checkpoint_every=1)
    trained(job_of(checkpoint_every=1, steps=2), "dp=2", out=tmp_path)
    check_equal(trained(job, "dp=2", out=tmp_path, resume=tmp_path), trained(job_of(), "dp=2"))


def test_a_metric_knows_the_number_of_updates() -> None:
    seen: list[int] = []

    def metric(model: nn.Module, batch: Any) -> Tensor:
        seen.append(ml.step())
        return model(batch["x"]).mean()

    trained(job_of(evaluate=Evaluate(data=Doubles, metrics={"mean": metric}, every=2)), "dp=2")
    assert sorted(set(seen)) == [0, 2, 4]


def test_there_is_no_step_outside_of_one() -> None:
    with pytest.raises(JobError, match="where no step is computed"):
        ml.step()


class Jitter(nn.Module):
    """Draws twice in a call, and what a condition says."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.from_numpy(numpy.random.standard_normal(7)).to(x)
        return x + noise if random.random() < 0.7 else x * random.uniform(0.5, 1.5)


class Jittered(nn.Module):
    """Two leaves, of which one is called twice, between layers; under dp another draw comes in between."""

    def __init__(self, *, also_beside: bool = False) -> None:
        super().__init__()
        self.one, self.other, self.also_beside = Jitter(), Jitter(), also_beside
        self.first, self.second, self.head = nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.one(x)).tanh()
        x = x * random.random() if self.also_beside else x
        return self.head(self.second(self.one(self.other(x))).tanh())


def leaf_job(model: Any = Jittered, **settings: Any) -> Job:
    sgd = {"optimizer": lambda named: torch.optim.SGD(named, lr=0.1), "drop_last": True}
    return job_of(model, class_loss, **sgd, leaves=[Jitter], **settings)


@pytest.mark.parametrize("plan", ["tp=2,microbatches=2", "pp=2,microbatches=2"])
@pytest.mark.long
def test_leaves_draw_in_programs_as_they_do_on_replicas(plan: str) -> None:
    check_equal(trained(leaf_job(), plan), trained(leaf_job(), "microbatches=2"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "plan"), [(Jittered, "dp=2,pp=2,tp=2"), (lambda: Jittered(also_beside=True), "dp=2")]
)
def test_leaves_draw_as_on_one_device(model: Any, plan: str) -> None:
    metric = {"mean": lambda model, batch: model(batch["x"]).mean()}
    job = leaf_job(model, evaluate=Evaluate(data=Doubles, metrics=metric, every=2))
    equals_one_device(job, plan, dtype=None)


@pytest.mark.parametrize("model", [Noisy, Jittered], ids=["module", "unnamed"])
def test_draws_outside_of_leaves_that_are_named_are_refused_in_programs(model: Any) -> None:
    with pytest.raises(
        CaptureError, match=r"draws from random at .*test_python_draws.py:\d+ .*torch.rand.*Job\(leaves="
    ) as refused:
        Trainer(job_of(model, class_loss), "tp=2", devices="simulated")
    assert refused.value.exit_code == 2


class Branching(Jitter):
    """A leaf because of its line, which draws besides."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() < 1e9 else x


@pytest.mark.long
def test_a_leaf_that_is_not_named_and_draws_is_refused() -> None:
    class Model(Jittered):
        def __init__(self) -> None:
            super().__init__()
            self.one = self.other = Branching()

    with pytest.raises(CaptureError, match=r"it draws with random or numpy; name it, leaves=\[Branching\]"):
        Trainer(job_of(Model, class_loss), "tp=2", devices="simulated")
