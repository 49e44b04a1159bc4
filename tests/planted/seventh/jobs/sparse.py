"""Tables of which a batch uses few rows: sparse gradients, bags, a largest norm, and a layer that few samples use."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import meshloom as ml

ROWS = 41


def words(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(ROWS, (count, 6), generator=generator)
    return TensorDataset(ids, torch.randint(3, (count,), generator=generator))


class Net(nn.Module):
    def __init__(self, **settings) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 7, **settings)
        self.mid = nn.Linear(7, 10)
        self.out = nn.Linear(10, 3)

    def forward(self, ids):
        return self.out(torch.tanh(self.mid(self.table(ids).mean(1))))


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, 7, mode="mean", padding_idx=3)
        self.mid = nn.Linear(7, 13)
        self.out = nn.Linear(13, 3)

    def forward(self, ids):
        return self.out(torch.tanh(self.mid(self.bag(ids))))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(9, 9)

    def forward(self, x):
        return x + torch.tanh(self.inside(x))


class Seldom(nn.Module):
    """One layer is for chunks with a marked sample."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 9)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.rare = nn.Linear(9, 9)
        self.out = nn.Linear(9, 3)

    def forward(self, x, marked):
        x = torch.tanh(self.inp(x))
        for block in self.blocks:
            x = block(x)
        if bool(marked.any()):
            x = x + marked[:, None] * self.rare(x)
        return self.out(x)


def marked_rows() -> TensorDataset:
    """Of each eight samples the fifth is marked."""
    generator = torch.Generator().manual_seed(5)
    marked = torch.zeros(48)
    marked[4::8] = 1.0
    return TensorDataset(
        torch.randn(48, 6, generator=generator), marked, torch.randint(3, (48,), generator=generator)
    )


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def marked_loss(model, batch):
    return F.cross_entropy(model(batch[0], batch[1]), batch[2])


def sgd(named):
    return torch.optim.SGD([each for _, each in named], lr=0.3)


def adam(named):
    return torch.optim.Adam([each for _, each in named], lr=1e-2)


rows = ml.Job(
    model=lambda: Net(sparse=True),
    loss=loss,
    optimizer=sgd,
    data=lambda: words(40, 1),
    batch_size=10,
    steps=30,
)
limited = ml.Job(
    model=lambda: Net(max_norm=1.2),
    loss=loss,
    optimizer=sgd,
    data=lambda: words(60, 2),
    batch_size=20,
    steps=30,
)
bags = ml.Job(model=Bags, loss=loss, optimizer=adam, data=lambda: words(40, 3), batch_size=10, steps=30)
seldom = ml.Job(
    model=Seldom, loss=marked_loss, optimizer=adam, data=marked_rows, batch_size=8, steps=30, shuffle=False
)
