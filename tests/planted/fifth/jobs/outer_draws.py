"""Layers are left out by Python's random, and numpy scales what goes in."""

from __future__ import annotations

import random

import numpy
import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.layers, self.head = (
            nn.Linear(8, 16),
            nn.ModuleList(nn.Linear(16, 16) for _ in range(3)),
            nn.Linear(16, 4),
        )

    def forward(self, x):
        x = torch.tanh(self.enter(x))
        for layer in self.layers:
            if not self.training or random.random() < 0.7:
                x = x + torch.tanh(layer(x))
        return self.head(x)


class Rows(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x, self.y = torch.randn(n, 8, generator=g), torch.randint(0, 4, (n,), generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + float(numpy.random.randn()) * 0.1, self.y[i]


def loss(model, batch):
    return F.cross_entropy(model(batch[0] * (1 + 0.1 * float(1) * numpy.random.rand())), batch[1])


def ce(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


job = ml.Job(
    model=Deep,
    loss=loss,
    optimizer=lambda named: torch.optim.Adam(named, lr=4e-3),
    data=lambda: Rows(18, 0),
    batch_size=8,
    steps=40,
    evaluate=ml.Evaluate(data=lambda: Rows(9, 1), metrics={"ce": ce}, every=5),
)
