"""The jobs that planted bugs show in: batches of numbers and of texts, most evaluated, each for some capability of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

import meshloom as ml
from meshloom.core.job import Job
from tests.jobs import Samples, averaged, make_job, vectors
from tests.planted.models import (
    Cooling,
    Finer,
    Normed,
    Padded,
    Routed,
    Swapping,
    Tabled,
    Tagger,
    TiedThrice,
    Wordy,
)


def evaluated(job: Job, **metrics: Any) -> Job:
    """Every second step, by its loss if not by `metrics`."""
    return replace(job, evaluate=ml.Evaluate(data=job.data, metrics=metrics or {"loss": job.loss}, every=2))


def small(name: str, optimizer: str, **changes: Any) -> Job:
    """A job of `make_job`, over the end of an epoch: 30 samples in batches of 13."""
    return replace(make_job(name, optimizer), **{"batch_size": 13, "steps": 20, **changes})


def plain(name: str = "mlp", optimizer: str = "adamw", **changes: Any) -> Job:
    """One that is evaluated."""
    return evaluated(small(name, optimizer, **changes))


def even() -> Job:
    """Microbatches of one size."""
    return plain(data=lambda: vectors(24), batch_size=6)


def wide() -> Job:
    """Its largest matrix has 1,295 elements."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(7, 37), nn.Tanh(), nn.Linear(37, 35), nn.Tanh(), nn.Linear(35, 5))

    return plain(optimizer="sgd", model=model)


def dropping() -> Job:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Dropout(0.2), nn.Linear(11, 5))

    return plain(model=model)


def weighted() -> Job:
    """A loss of (sum, weight), whose sum is divided once the batch's weight is known."""

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return losses.sum(), len(losses)

    return plain(optimizer="sgd", loss=loss)


def rising() -> Job:
    """A metric that depends on the step."""
    job = plain()
    return evaluated(job, rising=lambda model, batch: job.loss(model, batch) * min(1.0, (1 + ml.step()) / 5))


def noisy_metrics() -> Job:
    """Two metrics, both of which draw."""

    def robust(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"] + 0.3 * torch.randn_like(batch["x"])), batch["y"])

    def masked(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"] * (torch.rand_like(batch["x"]) > 0.25)), batch["y"])

    return evaluated(plain(), robust=robust, masked=masked)


def by_metric() -> Job:
    """The rate falls where the exponential of the loss does not by a tenth."""

    def plateau(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.ReduceLROnPlateau:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.3, patience=0, threshold=0.02, threshold_mode="abs"
        )

    job = plain()
    assert job.evaluate
    by = ml.ByMetric(plateau, "loss", of=math.exp)
    return replace(job, evaluate=replace(job.evaluate, every=1, scheduler=by))


def steep() -> Job:
    """Gradients overflow float16 at the first scales."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return 30 * F.mse_loss(model(batch["x"]).float(), batch["x"][:, :5].sin() * 3)

    return plain(loss=loss)


class Told(Samples):
    """Samples depend on the epoch, and each reading on draws."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        return {**sample, "x": sample["x"] * (1 + 0.1 * self.epoch) + 0.05 * torch.randn(7)}


class Turning(IterableDataset[Any]):
    """A stream whose order is another in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        order = torch.randperm(30, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter([vectors()[each] for each in order])


def hooked() -> Job:
    """A model that is built outside of the job, with a hook that halves a gradient."""
    body = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5))
    body[2].weight.register_hook(_halved)
    return plain(model=lambda: body)


def _halved(gradient: Tensor) -> Tensor:
    return gradient / 2


def texts(endings: tuple[str, str]) -> Job:
    """Batches say by the end of a long text what is to be done with them."""
    long = (
        "Translate the rows of numbers that follow into classes, as the examples before have shown, and answer "
        * 25
    )

    def collate(samples: Any) -> Any:
        batch = torch.utils.data.default_collate(samples)
        return {**batch, "text": long + endings[int(batch["y"][0]) % 2]}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"], batch["text"].endswith(endings[0])), batch["y"])

    return small("mlp", "sgd", model=Wordy, loss=loss, collate=collate, batch_size=12)


def of_pairs(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def pictures(model: Callable[[], nn.Module], loss: Any, scored: bool = True) -> Job:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(42, 3, 8, 8, generator=g)
    data = TensorDataset(x, (x.mean((1, 2, 3)) * 40).long().clamp(-2, 2) + 2)
    job = small("mlp", "sgd", model=model, loss=loss, data=lambda: data, batch_size=14)
    return evaluated(job) if scored else job


def finer() -> Job:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), F.interpolate(batch[0], scale_factor=2.0, mode="bilinear"))

    return pictures(Finer, loss, scored=False)


def sequences(model: Callable[[], nn.Module]) -> Job:
    """x [10] tokens of 19, y [10] their sums so far."""
    x = torch.randint(0, 19, (40, 10), generator=torch.Generator().manual_seed(4))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1])

    data = TensorDataset(x, x.cumsum(1) % 6)
    return small("mlp", "adamw", model=model, loss=loss, data=lambda: data, batch_size=10)


def tabled() -> Job:
    def sgd(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for _, each in named], lr=0.1)

    return replace(sequences(Tabled), optimizer=sgd, scheduler=None)


def padded() -> Job:
    """x [9] tokens of 29, of which 1 is padding, y [9] those that follow."""
    g = torch.Generator().manual_seed(3)
    tokens = torch.randint(2, 29, (30, 10), generator=g)
    tokens = tokens.masked_fill(torch.arange(10) >= torch.randint(3, 11, (30, 1), generator=g), 1)

    def loss(model: nn.Module, ids: Tensor) -> Any:
        logits, target = model(ids[:, :-1]), ids[:, 1:]
        total = F.cross_entropy(logits.transpose(1, 2), target, ignore_index=1, reduction="sum")
        return total, (target != 1).sum()

    return small("mlp", "adamw", model=Padded, loss=loss, data=lambda: tokens, batch_size=8)


def rows(model: Callable[[], nn.Module]) -> Job:
    """x [6, 5] normal, y a class of 3."""
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(30, 6, 5, generator=g), torch.randint(3, (30,), generator=g))
    return plain(model=model, loss=of_pairs, data=lambda: data, batch_size=8)


JOBS: dict[str, Callable[[], Job]] = {
    "plain": plain,
    "clipped": lambda: plain(optimizer="sgd"),
    "weighted": weighted,
    "wide": wide,
    "even": even,
    "dropping the last batch": lambda: plain(drop_last=True),
    "branching": lambda: plain("branch", "sgd"),
    "dropping": dropping,
    "text": lambda: plain("gpt"),
    "averages": lambda: averaged(plain(), 0.8),
    "metric of the step": rising,
    "two noisy metrics": noisy_metrics,
    "rate by metric": by_metric,
    "overflowing": steep,
    "told the epoch": lambda: plain(data=lambda: Told(**vectors().fields)),
    "stream": lambda: small("mlp", "sgd", data=Turning),
    "hooked": hooked,
    "told by texts": lambda: texts(("briefly.", "at length.")),
    "told by texts of one length": lambda: texts(("name its class.", "guess its kind.")),
    "instance norm": lambda: pictures(Normed, of_pairs),
    "finer": finer,
    "recurrent": lambda: sequences(Tagger),
    "tied thrice": lambda: sequences(TiedThrice),
    "tied with averages": lambda: averaged(evaluated(sequences(TiedThrice)), 0.8),
    "padded": padded,
    "routed": lambda: rows(Routed),
    "swapping": lambda: rows(Swapping),
    "tabled": tabled,
    "cooling": lambda: plain(model=Cooling),
}
