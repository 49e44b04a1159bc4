"""Convolutions with batch norm and dropout, and batch norm of rows."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import meshloom as ml


def pictures(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(count, 3, 9, 7, generator=generator), torch.randint(4, (count,), generator=generator)
    )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 7, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(7)
        self.drop = nn.Dropout(0.3)
        self.conv2 = nn.Conv2d(7, 5, 3, stride=2)
        self.norm2 = nn.BatchNorm2d(5)
        self.out = nn.Linear(60, 4)

    def forward(self, x):
        x = self.drop(torch.relu(self.norm1(self.conv1(x))))
        return self.out(torch.relu(self.norm2(self.conv2(x))).flatten(1))


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(189, 13)
        self.norm1 = nn.BatchNorm1d(13)
        self.mid = nn.Linear(13, 11)
        self.norm2 = nn.BatchNorm1d(11)
        self.out = nn.Linear(11, 4)

    def forward(self, x):
        x = torch.relu(self.norm1(self.inp(x.flatten(1))))
        return self.out(torch.relu(self.norm2(self.mid(x))))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def adam(named):
    return torch.optim.Adam([each for _, each in named], lr=3e-3)


uneven = ml.Job(model=Net, loss=loss, optimizer=adam, data=lambda: pictures(52, 1), batch_size=13, steps=30)
rows = ml.Job(model=Rows, loss=loss, optimizer=adam, data=lambda: pictures(48, 2), batch_size=12, steps=30)
