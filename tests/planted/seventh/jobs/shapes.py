"""Values that are shifted, halved, passed over stages, or computed by one layer in several of them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import meshloom as ml


def rows(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(count, 12, generator=generator), torch.randn(count, 3, generator=generator)
    )


class Shift(nn.Module):
    def forward(self, x):
        return torch.roll(x, 3, -1)


class Shifting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(12, 14)
        self.up = nn.Linear(14, 46)
        self.shift = Shift()
        self.down = nn.Linear(46, 14)
        self.out = nn.Linear(14, 3)

    def forward(self, x):
        x = torch.tanh(self.inp(x))
        return self.out(x + self.down(F.gelu(self.shift(self.up(x)))))


class Skips(nn.Module):
    """What `first` returns goes to two later stages."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(12, 17)
        self.first = nn.Linear(17, 15)
        self.middle = nn.Linear(15, 13)
        self.last = nn.Linear(28, 9)
        self.out = nn.Linear(9, 3)

    def forward(self, x):
        a = torch.tanh(self.first(torch.tanh(self.stem(x))))
        b = torch.tanh(self.middle(a))
        return self.out(torch.tanh(self.last(torch.cat([a, b], 1))))


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(12, 17)
        self.enc = nn.Linear(17, 22)
        self.gate = nn.Linear(11, 9)
        self.value = nn.Linear(11, 9)
        self.out = nn.Linear(9, 3)

    def forward(self, x):
        a, b = torch.tanh(self.enc(torch.tanh(self.stem(x)))).chunk(2, -1)
        return self.out(torch.sigmoid(self.gate(a)) * self.value(b))


class Shared(nn.Module):
    """One layer after each of three others."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(12, 11)
        self.own = nn.ModuleList(nn.Linear(11, 11) for _ in range(3))
        self.shared = nn.Linear(11, 11)
        self.out = nn.Linear(11, 3)

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        for own in self.own:
            x = x + torch.tanh(self.shared(torch.tanh(own(x))))
        return self.out(x)


def loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def adam(named):
    return torch.optim.Adam([each for _, each in named], lr=1e-2)


common = {"loss": loss, "optimizer": adam, "batch_size": 12, "steps": 30}
shifting = ml.Job(model=Shifting, data=lambda: rows(48, 1), **common)
skips = ml.Job(model=Skips, data=lambda: rows(48, 2), **common)
halves = ml.Job(model=Halves, data=lambda: rows(48, 3), **common)
shared = ml.Job(model=Shared, data=lambda: rows(48, 4), **common)
