"""A `collate` that changes the samples it is given, as those that take labels out of them do: every chunk is collated from samples as they
were read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import meshloom as ml
from tests.jobs_in_memory import normal
from tests.verified import equals_one_device

X, Y = normal(1, 7), normal(2, 3)


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": X[index].clone(), "labels": Y[index]}


def taking_out(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    labels = [each.pop("labels") for each in samples]
    return {"x": torch.stack([each["x"] for each in samples]), "y": torch.stack(labels)}


def halving(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    for each in samples:
        each["x"].mul_(0.5)
    return {"x": torch.stack([each["x"] for each in samples]), "y": torch.stack([each["labels"] for each in samples])}  # fmt: skip


def error(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def job(collate: Any) -> ml.Job:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 3))

    return ml.Job(
        model=model, loss=error, optimizer=lambda named: torch.optim.SGD(named, lr=0.1), data=Rows, batch_size=6, steps=9, collate=collate,
        evaluate=ml.Evaluate(data=Rows, metrics={"error": error}, every=3),
    )  # fmt: skip


@pytest.mark.parametrize("collate", [taking_out, halving])
@pytest.mark.slow
def test_it_is_verified(collate: Any):
    """One device collates a chunk once to run it and once to compare its data: the second time labels were gone."""
    equals_one_device(job(collate), "dp=2", quick=False, steps=3, dtype=None)
