"""`random`, numpy and `meshloom.step()` in forwards, losses and metrics: one device and all ranks draw alike."""

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
from meshloom.core.errors import JobError
from meshloom.core.job import Evaluate, Job
from meshloom.core.random import chunk_seed, model_seed, sample_order, seed_everything
from meshloom.replica.replica_state import full_state
from meshloom.train.trainer import Trainer

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
            x + torch.from_numpy(numpy.random.standard_normal(6)) * numpy.random.beta(0.4, 0.7)
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


def one_device(job: Job, num_chunks: int, steps: int = STEPS) -> list[Tensor]:
    """The parameters after a plain loop over the same chunks, each seeded, with the step counted by hand."""
    seed_everything(model_seed(job.seed))
    model = job.model()
    optimizer: Any = job.optimizer(list(model.named_parameters()))
    data = job.data()
    for step in range(steps):
        order = sample_order(job.seed, step // 3, len(data), True)[step % 3 * 12 :][:12]
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
        return [each.clone() for each in whole.values()]


def check_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        # sums over chunks are in another order
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("plan", EAGER)
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
