"""A U-Net of convolutions: the first one's output goes to the middle and to both ends; batch norms of cumulative averages."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import meshloom as ml


def data(n=22, s=0):
    g = torch.Generator().manual_seed(s)
    return TensorDataset(torch.randn(n, 2, 7, 9, generator=g), torch.randn(n, 1, 7, 9, generator=g))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 5, 3, padding=1)
        self.bn = nn.BatchNorm2d(5, momentum=None)
        self.mid = nn.Conv2d(5, 6, 3, padding=1)
        self.mid2 = nn.Conv2d(6, 5, 3, padding=1)
        self.last = nn.Conv2d(10, 4, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(4, momentum=None)
        self.head = nn.Conv2d(9, 1, 1)

    def forward(self, x):
        a = torch.relu(self.bn(self.first(x)))
        h = torch.relu(self.mid(a))
        h = torch.tanh(self.mid2(h + a.mean(1, keepdim=True)))
        return self.head(torch.cat([torch.relu(self.bn2(self.last(torch.cat([h, a], 1)))), a], 1))


def loss(m, b):
    return nn.functional.mse_loss(m(b[0]), b[1])


def make(**kw):
    a = {
        "model": UNet,
        "loss": loss,
        "optimizer": lambda named: torch.optim.SGD(
            [p for n, p in named], lr=0.1, momentum=0.9, nesterov=True
        ),
        "data": data,
        "batch_size": 8,
        "steps": 40,
        "scheduler": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        "evaluate": ml.Evaluate(data=lambda: data(7, 1), metrics={"mse": loss}, every=2),
    }
    a.update(kw)
    return ml.Job(**a)


job = make()
