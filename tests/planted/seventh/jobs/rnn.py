"""Recurrent layers: dropout between three layers, two directions, and a memory that a forward leaves for the next."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import meshloom as ml


def series(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(count, 6, 5, generator=generator), torch.randint(4, (count,), generator=generator)
    )


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(5, 9, num_layers=3, dropout=0.3, batch_first=True)
        self.drop = nn.Dropout(0.25)
        self.mid = nn.Linear(9, 11)
        self.out = nn.Linear(11, 4)

    def forward(self, x):
        x, _ = self.rnn(x)
        return self.out(torch.tanh(self.mid(self.drop(x[:, -1]))))


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.rnn = nn.GRU(7, 10, bidirectional=True, batch_first=True)
        self.out = nn.Linear(20, 4)

    def forward(self, x):
        x, _ = self.rnn(torch.tanh(self.inp(x)))
        return self.out(x.mean(1))


class Memory(nn.Module):
    """Adds up what it has seen, in a plain attribute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.seen = torch.zeros(width)

    def forward(self, x):
        found = x * self.scale + 0.5 * self.seen
        self.seen += x.detach().mean(0)
        return found


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(30, 13)
        self.memory = Memory(13)
        self.out = nn.Linear(13, 4)

    def forward(self, x):
        return self.out(torch.tanh(self.memory(self.inp(x.flatten(1)))))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def adam(named):
    return torch.optim.Adam([each for _, each in named], lr=5e-3)


common = {"loss": loss, "optimizer": adam, "steps": 30}
stacked = ml.Job(model=Stacked, data=lambda: series(40, 1), batch_size=10, **common)
both = ml.Job(model=Both, data=lambda: series(40, 2), batch_size=10, **common)
memory = ml.Job(model=Remembering, data=lambda: series(36, 3), batch_size=12, shuffle=False, **common)
