"""Noise is told from signals: draws in the loss, a number and a text in every batch, norms of single samples."""

from __future__ import annotations

import numpy
import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.times = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.down, self.mid, self.up = (
            nn.Conv1d(2, 16, 4, 2, 1),
            nn.Conv1d(16, 16, 3, padding=1),
            nn.ConvTranspose1d(16, 2, 4, 2, 1),
        )
        self.norm, self.drop = nn.InstanceNorm1d(16, affine=True), nn.Dropout1d(0.1)

    def forward(self, x, t):
        rates = torch.exp(-torch.arange(4) / 2.0)
        e = torch.cat([torch.sin(t[:, None] * rates), torch.cos(t[:, None] * rates)], 1)
        h = F.silu(self.down(x)) + self.times(e)[:, :, None]
        return self.up(self.drop(self.norm(F.silu(self.mid(h)))))


class Signals(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        self.x = torch.randn(n, 2, 8, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


def collate(samples):
    return {"x": torch.stack(samples), "level": float(numpy.random.rand()), "task": "noise"}


def loss(model, batch):
    x = batch["x"]
    t = torch.randint(1, 20, (len(x),)).float()
    noise = torch.randn_like(x)
    level = (t / 20)[:, None, None] * (0.5 + batch["level"])
    found = model(x + level * noise, t)
    if batch["task"] == "noise":
        return F.mse_loss(found, noise)
    return F.l1_loss(found, x)


def smooth(model, batch):
    x = batch["x"]
    noise = torch.randn_like(x)
    return F.smooth_l1_loss(model(x + noise * batch["level"], torch.full((len(x),), 3.0)), noise)


def sharp(model, batch):
    x = batch["x"]
    noise = torch.randn_like(x)
    return F.l1_loss(model(x + 0.5 * noise, torch.full((len(x),), 9.0)), noise)


job = ml.Job(
    model=Net,
    loss=loss,
    optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3),
    data=lambda: Signals(19, 0),
    batch_size=8,
    steps=40,
    collate=collate,
    scheduler=lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.2, total_iters=6),
    evaluate=ml.Evaluate(
        data=lambda: Signals(7, 1), metrics={"smooth": smooth, "sharp": sharp}, every=5, batch_size=3
    ),
)
