"""A stream with draws and epochs of several lengths; a model with a counter in an attribute and noise of its own."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.calls = nn.Linear(6, 14), nn.Linear(14, 3), 0

    def forward(self, x):
        if self.training:
            self.calls += 1
        x = F.relu(self.one(x)) * (1 + 0.01 * self.calls)
        if self.training:
            x = x + 0.1 * torch.rand(x.shape[1])
        return self.two(x)


class Flow(torch.utils.data.IterableDataset):
    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for n in range(17 + self.epoch % 3):
            x = torch.full((6,), n / 17.0) + torch.randn(6) * 0.3 + self.epoch * 0.02
            yield {"x": x + random.random() * 0.1, "y": torch.tensor(n % 3)}


def loss(model, batch):
    ml.log("size", float(len(batch["x"])))
    return F.cross_entropy(model(batch["x"]), batch["y"])


def correct(model, batch):
    return (model(batch["x"]).argmax(1) == batch["y"]).sum().float(), len(batch["y"])


class Held(torch.utils.data.Dataset):
    def __len__(self):
        return 7

    def __getitem__(self, i):
        return {"x": torch.randn(6) + i, "y": torch.tensor(i % 3)}


job = ml.Job(
    model=Noisy,
    loss=loss,
    optimizer=lambda named: torch.optim.NAdam(named, lr=5e-3),
    data=Flow,
    batch_size=6,
    steps=40,
    scheduler=lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o, 0.3, 3), torch.optim.lr_scheduler.ExponentialLR(o, 0.95)],
        [3],
    ),
    evaluate=ml.Evaluate(data=Held, metrics={"correct": correct}, every=4),
)
