"""Two layers of one weight under lower precision; drop_last; large losses that overflow float16."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(10, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.three.weight = self.two.weight
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 6)

    def forward(self, x):
        x = F.gelu(self.one(x))
        x = F.gelu(self.three(F.gelu(self.two(x))))
        return self.head(self.norm(x))


class Rows(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x, self.y = torch.randn(n, 10, generator=g), torch.randint(0, 6, (n,), generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def large_loss(model, batch):
    return 300 * loss(model, batch)


def ce(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1], reduction="sum"), len(batch[1])


job = ml.Job(
    model=Half,
    loss=loss,
    optimizer=lambda named: torch.optim.AdamW(named, lr=4e-3),
    data=lambda: Rows(21, 0),
    batch_size=8,
    steps=40,
    drop_last=True,
    scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 6),
    clip_grad_norm=1.0,
    evaluate=ml.Evaluate(data=lambda: Rows(9, 1), metrics={"ce": ce}, every=5),
)
overflowing = replace(job, loss=large_loss)
