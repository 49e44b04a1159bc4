"""`random`, numpy and `meshloom.step()` in forwards, losses and metrics: one device and all ranks draw alike."""

from __future__ import annotations

import math
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
from meshloom.core.plan import Plan
from meshloom.core.random import chunk_seed, model_seed, sample_order, seed_everything
from meshloom.replica.replica_state import full_state
from meshloom.train.trainer import Trainer

STEPS = 4
PROGRAMS = ["tp=2", "pp=2,microbatches=2", "dp=2,pp=2,tp=2", "dp=2,tp=2,zero=3"]
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


def one_device(job: Job, num_chunks: int, *, drop_last: bool = False) -> list[Tensor]:
    """The parameters after a plain loop over the same chunks, each seeded, with the step counted by hand."""
    seed_everything(model_seed(job.seed))
    model = job.model()
    optimizer: Any = job.optimizer(list(model.named_parameters()))
    data = job.data()
    each = 2 if drop_last else 3
    for step in range(STEPS):
        order = sample_order(job.seed, step // each, len(data), True)[step % each * 12 :][:12]
        optimizer.zero_grad()
        size = len(order) // num_chunks
        for chunk in range(num_chunks):
            samples = [data[i] for i in order[chunk * size : (chunk + 1) * size]]
            seed_everything(chunk_seed(job.seed, step, chunk))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ml, "step", lambda step=step: step)
                batch = {key: torch.stack([each[key] for each in samples]) for key in ("x", "y")}
                (job.loss(model, batch) * size / len(order)).backward()
        optimizer.step()
    return [each.detach() for each in model.parameters()]


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
    check_equal(trained(job_of(), plan), one_device(job_of(), 2))


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


def chunks_of(plan: str) -> int:
    return Plan.parse(plan).num_chunks


class Drops(nn.Module):
    """Two layers, each left out in some chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            if random.random() >= 0.4:
                x = x + layer(x).relu()
        return self.head(x)


FEW = [(Noisy, "dp=2,pp=2,tp=2"), (Drops, "tp=2")]  # the rest is slow


def annealed(model: nn.Module, batch: Any) -> Tensor:
    found = model(batch["x"])
    weight = min(1.0, ml.step() / 2) + math.exp(-ml.step() / 3)
    loss = F.cross_entropy(found, batch["y"])
    return loss + weight * found.square().mean() if ml.step() % 2 == 0 else loss


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "loss", "plan"),
    [
        pytest.param(model, loss, plan, marks=() if (model, plan) in FEW else pytest.mark.slow)
        for plan in PROGRAMS
        for model, loss in ((Noisy, mixup), (Drops, annealed))
    ],
)
def test_draws_are_inputs_of_programs(plan: str, model: Any, loss: Any) -> None:
    job = job_of(model, loss, drop_last=True, optimizer=lambda named: torch.optim.SGD(named, lr=0.1))
    check_equal(trained(job, plan), one_device(job, chunks_of(plan), drop_last=True))


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() > 0.5:  # here
                x = layer(x)
        return x


@pytest.mark.long
@pytest.mark.slow
def test_too_many_ways_are_refused_by_name() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["x"]).mean()

    with pytest.raises(CaptureError, match=r"# here.* in more than 16 ways"):
        trained(job_of(Many, loss), "tp=2,recompute=full")


NEEDS_IT = {
    "the number itself is needed": lambda x: x * float(random.random()),
    "random.shuffle changes its argument": lambda x: random.shuffle([1, 2]) or x,
    "NumPy needs the number itself": lambda x: x * numpy.asarray(random.random()).item(),
    "would keep the one draw": lambda x: x * unbound(),
}
unbound = random.random


@pytest.mark.parametrize("why", list(NEEDS_IT))
@pytest.mark.long
def test_what_cannot_be_an_input_is_refused_by_name(why: str) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(NEEDS_IT[why](batch["x"])).mean()

    with pytest.raises(CaptureError, match=why):
        trained(job_of(lambda: nn.Linear(7, 7), loss), "tp=2,recompute=full")
