"""Metrics on held-out data: some draw, batches are short, and one decides which checkpoint is best."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import meshloom as ml


def rows(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(count, 10, generator=generator), torch.randint(3, (count,), generator=generator)
    )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(10, 19)
        self.norm = nn.LayerNorm(19)
        self.out = nn.Linear(19, 3)

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.inp(x))))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def robust(model, batch):
    """The loss on noisy inputs."""
    return F.cross_entropy(model(batch[0] + 0.3 * torch.randn_like(batch[0])), batch[1])


def masked(model, batch):
    """Of inputs some of which are left out: (sum, weight)."""
    kept = (torch.rand_like(batch[0]) > 0.25).float()
    losses = F.cross_entropy(model(batch[0] * kept), batch[1], reduction="none")
    return losses.sum(), len(losses)


def accuracy(model, batch):
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


def adam(rate):
    return lambda named: torch.optim.Adam([each for _, each in named], lr=rate)


common = {"model": Net, "loss": loss, "data": lambda: rows(43, 1), "batch_size": 12, "steps": 30}
noisy = ml.Job(
    optimizer=adam(1e-2),
    evaluate=ml.Evaluate(
        data=lambda: rows(17, 2), metrics={"robust": robust, "masked": masked}, every=1, batch_size=6
    ),
    **common,
)
dropping = ml.Job(
    optimizer=adam(1e-2),
    drop_last=True,
    evaluate=ml.Evaluate(
        data=lambda: rows(17, 2), metrics={"loss": loss, "accuracy": accuracy}, every=1, batch_size=6
    ),
    **common,
)
best = ml.Job(
    optimizer=adam(1e-6),
    evaluate=ml.Evaluate(
        data=lambda: rows(17, 2), metrics={"accuracy": accuracy}, every=1, best="accuracy:max"
    ),
    **common,
)
