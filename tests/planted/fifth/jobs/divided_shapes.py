"""Shapes whose dims are divided: cat, split, pad, slices, einsum, pixel shuffle, weight norm, repeats."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Shapes(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.utils.parametrizations.weight_norm(nn.Linear(9, 14)), nn.Linear(9, 10)
        self.slope, self.mixing = nn.PReLU(14), nn.Parameter(torch.randn(3, 8, 6) * 0.3)
        self.conv, self.shuffle = nn.Conv2d(6, 16, 1), nn.PixelShuffle(2)
        self.last, self.scale = nn.Linear(24, 5), nn.Parameter(torch.ones(24))
        self.table = nn.Parameter(torch.randn(7, 24) * 0.2)

    def forward(self, x, which):
        a, b = self.slope(self.one(x)), torch.tanh(self.two(x))
        y = torch.cat([a, b], 1)
        left, right = y.split([10, 14], 1)
        y = torch.cat([right[:, 2:], F.pad(left, (0, 2))], 1)
        y = y.view(len(x), 3, 8)
        z = torch.einsum("bgi,gio->bgo", y, self.mixing)
        p = self.shuffle(self.conv(z.transpose(1, 2).unsqueeze(-1)))
        y = y.flatten(1) * self.scale + p.mean((2, 3)).repeat(1, 6) + self.table[which]
        return self.last(F.dropout(y, 0.1, self.training)), y


class Rows(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x, self.y, self.w = (
            torch.randn(n, 9, generator=g),
            torch.randn(n, 5, generator=g),
            torch.randint(0, 7, (n,), generator=g),
        )

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i], self.w[i]


def loss(model, batch):
    out, y = model(batch[0], batch[2])
    return (
        F.huber_loss(out, batch[1], delta=0.7)
        + 0.01 * (y**2).mean()
        + 0.1 * F.mse_loss(y, torch.zeros_like(y))
    )


def l1(model, batch):
    return F.l1_loss(model(batch[0], batch[2])[0], batch[1])


job = ml.Job(
    model=Shapes,
    loss=loss,
    optimizer=lambda named: torch.optim.SGD(named, lr=0.5, momentum=0.9),
    data=lambda: Rows(20, 0),
    batch_size=8,
    steps=40,
    clip_grad_norm=0.05,
    scheduler=lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 40),
    evaluate=ml.Evaluate(data=lambda: Rows(9, 1), metrics={"l1": l1}, every=5),
)
