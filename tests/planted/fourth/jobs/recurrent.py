"""An LSTM with learned initial states, and a GRU cell that is called step by step."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Sequences(torch.utils.data.Dataset):
    def __init__(self, num_sequences, seed=1):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(num_sequences, 5, 4, generator=generator)
        self.y = torch.randint(0, 3, (num_sequences,), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index]}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, 6)
        self.lstm = nn.LSTM(6, 10, 2, bidirectional=True, batch_first=True, dropout=0.1)
        self.h0 = nn.Parameter(torch.randn(4, 1, 10))
        self.c0 = nn.Parameter(torch.randn(4, 1, 10))
        self.out = nn.Linear(20, 3)

    def forward(self, x):
        size = x.shape[0]
        hidden = self.h0.expand(4, size, 10).contiguous()
        cell = self.c0.expand(4, size, 10).contiguous()
        y, _ = self.lstm(self.inp(x), (hidden, cell))
        return self.out(y.mean(1))


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, 6)
        self.cell = nn.GRUCell(6, 10)
        self.start = nn.Linear(4, 10)
        self.out = nn.Linear(10, 3)

    def forward(self, x):
        hidden = torch.tanh(self.start(x[:, 0]))
        entered = self.inp(x)
        for moment in range(5):
            hidden = self.cell(entered[:, moment], hidden)
        return self.out(hidden)


def class_loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def right(model, batch):
    return (model(batch["x"]).argmax(1) == batch["y"]).float().mean()


job = ml.Job(
    model=Tagger,
    loss=class_loss,
    optimizer=lambda named: torch.optim.Adam([p for _, p in named], lr=5e-3),
    data=lambda: Sequences(21),
    batch_size=6,
    steps=40,
    clip_grad_norm=1.0,
    evaluate=ml.Evaluate(data=lambda: Sequences(7, 3), metrics={"acc": right}, every=10),
)
cells = replace(job, model=Cells)
