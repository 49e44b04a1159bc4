"""Tiles: convolutions with norms of batches and groups, mixed pictures, a rate that goes round."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Block(nn.Module):
    def __init__(self, wide, norm):
        super().__init__()
        self.one, self.two = nn.Conv2d(wide, 2 * wide, 3, padding=1), nn.Conv2d(2 * wide, wide, 1)
        self.side, self.norm = nn.Conv2d(wide, wide, 1, bias=False), norm(wide)

    def forward(self, x):
        return self.norm(self.side(x) + self.two(F.gelu(self.one(x))))


class Tiles(nn.Module):
    def __init__(self, momentum=0.2):
        super().__init__()
        self.stem = nn.Conv2d(3, 10, 3, stride=2, padding=1)
        self.first = Block(10, lambda wide: nn.BatchNorm2d(wide, momentum=momentum))
        self.second = Block(10, lambda wide: nn.GroupNorm(5, wide))
        self.deep = nn.Conv2d(10, 10, 3, padding=1, groups=10)
        self.last, self.head = nn.BatchNorm2d(10), nn.Linear(10, 6)

    def forward(self, x):
        x = self.second(self.first(F.relu(self.stem(x))))
        return self.head(F.relu(self.last(self.deep(x))).mean((2, 3)))


class Pictures(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x, self.y = torch.randn(n, 3, 9, 9, generator=g), torch.randint(0, 6, (n,), generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"x": self.x[i] + 0.2 * torch.rand(9), "y": self.y[i]}


def mix(batch, others):
    share = 0.6 + 0.4 * torch.rand(())
    mixed = share * batch["x"] + (1 - share) * others["x"]
    return {"x": mixed, "y": batch["y"], "other": others["y"], "share": share.expand(len(mixed))}


def loss(model, batch):
    logits = model(batch["x"])
    own, other = (F.cross_entropy(logits, batch[each], reduction="none") for each in ("y", "other"))
    return (batch["share"] * own + (1 - batch["share"]) * other).mean()


def plain_loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def hits(model, batch):
    return (model(batch["x"]).argmax(1) == batch["y"]).float().sum(), len(batch["y"])


job = ml.Job(
    model=Tiles,
    loss=loss,
    mix=mix,
    optimizer=lambda named: torch.optim.SGD(named, lr=0.08, momentum=0.9, nesterov=True, weight_decay=1e-3),
    data=lambda: Pictures(31, 7),
    batch_size=12,
    steps=30,
    scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    evaluate=ml.Evaluate(
        data=lambda: Pictures(14, 8), metrics={"hits": hits, "ce": plain_loss}, every=3, best="hits:max"
    ),
)
plain = replace(job, mix=None, loss=plain_loss)
cumulative = replace(plain, model=lambda: Tiles(momentum=None))
