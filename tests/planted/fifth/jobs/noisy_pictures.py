"""Noisy pictures: norms of batches, one of them cumulative, groups, dropped channels, a counter and a moving level."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Conv(nn.Module):
    def __init__(self, level=True):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12, momentum=0.3)
        self.left, self.right = nn.Conv2d(12, 10, 3, padding=1), nn.Conv2d(12, 10, 1)
        self.depth, self.groups = nn.Conv2d(10, 20, 3, padding=1, groups=5), nn.GroupNorm(5, 20)
        self.last, self.mean = nn.BatchNorm2d(20, momentum=None), nn.AdaptiveAvgPool2d(1)
        self.drop, self.head = nn.Dropout2d(0.2), nn.Linear(20, 7)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("level", torch.zeros(12) if level else None)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        if self.training:
            self.seen += 1
        if self.training and self.level is not None:
            with torch.no_grad():
                self.level.mul_(0.9).add_(0.1 * x.mean((0, 2, 3)))
        x = F.max_pool2d(F.relu(self.left(x)) + self.right(x), 2)
        x = self.last(F.relu(self.groups(self.depth(self.drop(x)))))
        return self.head(self.mean(x).flatten(1))


class Pictures(torch.utils.data.Dataset):
    def __init__(self, n, seed, noise=0.1):
        g = torch.Generator().manual_seed(seed)
        self.x, self.y, self.noise = (
            torch.randn(n, 3, 6, 6, generator=g),
            torch.randint(0, 7, (n,), generator=g),
            noise,
        )

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i] + self.noise * torch.randn(3, 6, 6), self.y[i]


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def accuracy(model, batch):
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


def ce(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


job = ml.Job(
    model=Conv,
    loss=loss,
    optimizer=lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    data=lambda: Pictures(27, 0),
    batch_size=12,
    steps=40,
    scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=41),
    evaluate=ml.Evaluate(
        data=lambda: Pictures(13, 1), metrics={"accuracy": accuracy, "ce": ce}, every=5, best="accuracy:max"
    ),
)
without_level = replace(job, model=lambda: Conv(level=False))
