"""Two views of each row are brought together: two layers are frozen, and one matrix has 1,221 elements."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import meshloom as ml


def data(n=26, s=0):
    g = torch.Generator().manual_seed(s)
    x = torch.randn(n, 9, generator=g)
    return TensorDataset(x, x + 0.1 * torch.randn(n, 9, generator=g))


class Twin(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(9, 33)
        self.b = nn.Linear(33, 33)
        self.c = nn.Linear(33, 33)
        self.proj = nn.Linear(33, 37)
        self.temp = nn.Parameter(torch.zeros(()))
        for p in (*self.a.parameters(), *self.b.parameters()):
            p.requires_grad_(False)

    def forward(self, x):
        return nn.functional.normalize(
            self.proj(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x))))))), dim=1
        )


def loss(m, b):
    s = m(b[0]) @ m(b[1]).T * m.temp.exp()
    return nn.functional.cross_entropy(s, torch.arange(len(s)))


job = ml.Job(
    model=Twin,
    loss=loss,
    optimizer=lambda named: torch.optim.SGD([p for n, p in named], lr=0.5, momentum=0.9),
    data=data,
    batch_size=8,
    steps=40,
    clip_grad_norm=0.2,
    evaluate=ml.Evaluate(data=lambda: data(12, 1), metrics={"nce": loss}, every=2),
)
