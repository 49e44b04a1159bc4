"""Generators that datasets and their transforms hold: what a sample is does not depend on which rank reads it, nor after which others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, Subset

import meshloom as ml
from meshloom.data.dataset_generators import DatasetGenerators
from tests.verified import equals_one_device

QUIET = ml.Listener(started=str, note=str)


class Jitter:
    def __init__(self, seed: int) -> None:
        self.source = random.Random(seed)

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.source.random()


class Drawing(Dataset[Any]):
    """With a generator of each kind, and transforms that have some."""

    def __init__(self) -> None:
        self.new, self.old = numpy.random.default_rng(0), numpy.random.RandomState(1)
        self.torchs = torch.Generator().manual_seed(2)
        self.transforms = [Jitter(3), Jitter(4)]

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(7, generator=self.torchs) + torch.from_numpy(self.old.rand(7)).float()
        for transform in self.transforms:
            x = transform(x)
        return {"x": x, "y": torch.from_numpy(self.new.normal(size=3)).float()}


class Streamed(IterableDataset[Any]):
    def __init__(self) -> None:
        self.inner = Drawing()

    def __iter__(self) -> Iterator[Any]:
        return (self.inner[index] for index in range(26))


def error(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def job(**changes: Any) -> ml.Job:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 3))

    def data() -> Any:
        return Subset(Drawing(), range(25))

    settings: dict[str, Any] = {
        "evaluate": ml.Evaluate(data=Drawing, metrics={"error": error}, every=50), "data": data, "steps": 8,
    }  # fmt: skip
    return ml.Job(
        model=model, loss=error, optimizer=lambda named: torch.optim.SGD(named, lr=0.1), batch_size=6, **{**settings, **changes}
    )  # fmt: skip


def losses(of: ml.Job, plan: str) -> list[float]:
    with ml.Trainer(of, plan, devices="simulated", dtype=torch.float64, listener=QUIET) as trainer:
        found = [trainer.step(batch) for batch in trainer.batches()]
        return [*found, trainer.evaluate()["error"]] if of.evaluate else found


@pytest.mark.parametrize("plan", ["dp=2", "dp=3,microbatches=2"])
@pytest.mark.parametrize("data", [None, Streamed], ids=["map", "stream"])
@pytest.mark.long
def test_samples_are_those_of_one_device(data: Any, plan: str):
    of = job() if data is None else job(data=data)
    assert losses(of, plan) == pytest.approx(losses(of, "dp=1"), rel=1e-9)


@pytest.mark.long
def test_workers_read_the_same():
    of = job(evaluate=None, steps=3)
    assert losses(replace(of, num_workers=2), "dp=1") == pytest.approx(losses(of, "dp=1"), rel=1e-9)


@pytest.mark.parametrize("data", [None, Streamed], ids=["map", "stream"])
@pytest.mark.slow
def test_verified_and_resumed(data: Any):
    of = job() if data is None else job(data=data)
    equals_one_device(of, "dp=2,zero=1", quick=False, steps=3, dtype=None)


def test_found_by_their_paths_and_none_where_there_are_none():
    assert DatasetGenerators(Subset(Drawing(), range(3))).names == [
        "dataset.new", "dataset.old", "dataset.torchs", "dataset.transforms.0.source", "dataset.transforms.1.source",
    ]  # fmt: skip
    assert DatasetGenerators([{"x": torch.zeros(2)}]).names == []


class Shared(Dataset[Any]):
    """One generator under two names, one of which is deeper."""

    def __init__(self) -> None:
        jitter = Jitter(5)
        self.deep, self.near = [[jitter]], jitter.source
        self.jitter = jitter

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.jitter(torch.ones(7)), "y": torch.full((3,), self.near.random())}


@pytest.mark.slow
def test_one_that_is_held_twice_is_seeded_once():
    assert len(DatasetGenerators(Shared()).names) == 1
    equals_one_device(job(data=Shared), "dp=2", quick=False, steps=3, dtype=None)
