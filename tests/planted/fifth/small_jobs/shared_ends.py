"""Equal layers with dropout between a layer that both ends share, by Adam with amsgrad."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import meshloom as ml


def data(n=26, s=0):
    g = torch.Generator().manual_seed(s)
    x = torch.randn(n, 8, generator=g)
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.drop = nn.ModuleList(nn.Dropout(0.15) for _ in range(6))
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        x = self.inp(x)
        for a, d in zip(self.layers, self.drop, strict=False):
            x = x + d(torch.tanh(a(x)))
        return self.out(torch.tanh(self.inp(x)))


def loss(m, b):
    return nn.functional.cross_entropy(m(b[0]), b[1])


job = ml.Job(
    model=Deep,
    loss=loss,
    optimizer=lambda named: torch.optim.Adam([p for n, p in named], lr=1e-2, amsgrad=True),
    data=data,
    batch_size=12,
    steps=40,
    scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / (1 + s)),
    evaluate=ml.Evaluate(data=lambda: data(7, 1), metrics={"ce": loss}, every=2),
)
