"""Tokens and channels are mixed in turn, with transposes between; six tokens of five channels."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import meshloom as ml


def data(n=26, s=0):
    g = torch.Generator().manual_seed(s)
    return TensorDataset(torch.randn(n, 6, 5, generator=g), torch.randint(0, 3, (n,), generator=g))


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, 5)
        self.tokens = nn.Linear(6, 6)
        self.drop1 = nn.Dropout(0.2)
        self.channels = nn.Linear(5, 5)
        self.drop2 = nn.Dropout(0.2)
        self.tokens2 = nn.Linear(6, 6)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        x = torch.tanh(self.embed(x))
        x = self.drop1(x).transpose(1, 2)
        x = torch.tanh(self.tokens(x)).transpose(1, 2) + 0.5 * x.transpose(1, 2)
        x = self.drop2(torch.tanh(self.channels(x))).transpose(1, 2)
        x = torch.tanh(self.tokens2(x)).mean(2)
        return self.head(x[:, :5])


def loss(m, b):
    return nn.functional.cross_entropy(m(b[0]), b[1])


job = ml.Job(
    model=Mixer,
    loss=loss,
    optimizer=lambda named: torch.optim.Adam([p for n, p in named], lr=1e-2),
    data=data,
    batch_size=8,
    steps=40,
    scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 40),
    evaluate=ml.Evaluate(data=lambda: data(11, 1), metrics={"ce": loss}, every=2),
)
