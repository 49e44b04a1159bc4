"""Tickers: a stream whose epochs differ, batches that grow, a noise that grows with the step, two optimizers."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.out = nn.Linear(9, 17), nn.Linear(17, 17), nn.Linear(17, 2)
        self.bend = nn.PReLU(17)
        self.register_buffer("level", torch.zeros(17))
        self.seen = 0

    def forward(self, x):
        x = self.bend(self.one(x))
        if self.training:
            self.seen += 1
            with torch.no_grad():
                self.level.mul_(0.95).add_(0.05 * x.mean(0))
            x = x + 0.02 * min(ml.step(), 20) * torch.randn(x.shape[1])
        x = F.dropout(x, 0.1, self.training)
        return self.out(torch.tanh(self.two(x)) * (1 + 0.005 * self.seen))


class Ticks(torch.utils.data.IterableDataset):
    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for n in range(26 + 3 * (self.epoch % 2)):
            x = torch.sin(torch.arange(9.0) + n + self.epoch) + 0.2 * torch.randn(9)
            yield {"x": x, "y": x[:2] * random.uniform(0.8, 1.2)}


class Past(torch.utils.data.Dataset):
    def __len__(self):
        return 9

    def __getitem__(self, i):
        x = torch.cos(torch.arange(9.0) * i) + 0.1 * torch.randn(9)
        return {"x": x, "y": x[:2]}


def loss(model, batch):
    return F.huber_loss(model(batch["x"]), batch["y"])


def off(model, batch):
    return (model(batch["x"]) - batch["y"]).abs().sum(), 2 * len(batch["x"])


def optimizers(named):
    return [
        torch.optim.SGD([each for each in named if each[1].ndim > 1], lr=0.05, momentum=0.8),
        torch.optim.NAdam([each for each in named if each[1].ndim < 2], lr=1e-2),
    ]


job = ml.Job(
    model=Forecast,
    loss=loss,
    optimizer=optimizers,
    data=Ticks,
    batch_size=11,
    batch_sizes={0: 5, 3: 8, 9: 11},
    steps=40,
    seed=2,
    frozen={"two": range(2), "out.bias": range(3, 7)},
    scheduler=lambda both: [
        torch.optim.lr_scheduler.StepLR(both[0], 2, 0.8),
        torch.optim.lr_scheduler.CyclicLR(both[1], 1e-3, 2e-2, step_size_up=3, cycle_momentum=False),
    ],
    evaluate=ml.Evaluate(data=Past, metrics={"off": off}, every=3, batch_size=4),
)
of_lists = replace(job, data=lambda: [*Ticks()], seed=4, shuffle=True)
