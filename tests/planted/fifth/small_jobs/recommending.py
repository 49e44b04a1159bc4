"""Two tables with sparse gradients, of items and of users."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import meshloom as ml


def data(n=26, s=0):
    g = torch.Generator().manual_seed(s)
    return TensorDataset(
        torch.randint(0, 97, (n, 3), generator=g),
        torch.randn(n, 4, generator=g),
        torch.randint(0, 2, (n,), generator=g),
    )


class Rec(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(97, 5, sparse=True)
        self.users = nn.Embedding(97, 3, sparse=True)
        self.mid = nn.Linear(12, 9)
        self.out = nn.Linear(9, 2)

    def forward(self, i, x):
        return self.out(torch.relu(self.mid(torch.cat([self.items(i).mean(1), self.users(i[:, 0]), x], 1))))


def loss(m, b):
    return nn.functional.cross_entropy(m(b[0], b[1]), b[2])


def opt(named):
    e = [p for n, p in named if "items" in n or "users" in n]
    r = [p for n, p in named if not ("items" in n or "users" in n)]
    return [torch.optim.SparseAdam(e, lr=0.05), torch.optim.AdamW(r, lr=0.01)]


job = ml.Job(
    model=Rec,
    loss=loss,
    optimizer=opt,
    data=data,
    batch_size=8,
    steps=40,
    evaluate=ml.Evaluate(data=lambda: data(11, 1), metrics={"ce": loss}, every=2),
)
