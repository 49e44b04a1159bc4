"""Coarse numbers: a loss that is large at first and drawn by a cube, for precisions with few digits or a small range."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Coarse(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, 26), nn.Linear(26, 26), nn.Linear(26, 2)
        self.norm, self.drop = nn.LayerNorm(26), nn.Dropout(0.1)

    def forward(self, x):
        x = F.relu(self.one(x))
        return self.three(F.gelu(self.two(self.drop(self.norm(x)))))


class Hills(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 8, generator=g)
        self.y = 4 * self.x[:, :2] ** 3

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def loss(model, batch):
    return F.mse_loss(model(batch[0]).float(), batch[1])


job = ml.Job(
    model=Coarse,
    loss=loss,
    optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
    data=lambda: Hills(50, 8),
    batch_size=15,
    steps=30,
    clip_grad_norm=20.0,
    scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    evaluate=ml.Evaluate(data=lambda: Hills(12, 9), metrics={"mse": loss}, every=4),
)
thawing = replace(job, frozen={"two": range(1, 3), "three.bias": range(1)})
