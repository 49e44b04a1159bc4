"""Tides: long sequences in parts, whose state stays in an attribute; numbers and texts in the batch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Tide(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.cell = nn.Linear(4, 13), nn.GRUCell(13, 13)
        self.out = nn.Linear(13, 4)
        self.state = None

    def forward(self, x, way):
        h = torch.zeros(len(x), 13, dtype=x.dtype) if self.state is None else self.state
        if len(h) != len(x):
            h = torch.zeros(len(x), 13, dtype=x.dtype)
        for t in range(x.shape[1]):
            h = self.cell(torch.tanh(self.enter(x[:, t])), h)
        if self.training:
            self.state = h.detach()
        return self.out(h) if way == "ebb" else -self.out(h)


class Waves(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        self.x = torch.randn(n, 3, 4, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], i


def collate(samples):
    x = torch.stack([each for each, _ in samples])
    x = x + 0.1 * torch.randn(4)
    return {"x": x, "way": "ebb" if samples[0][1] % 2 else "flow", "strength": 0.5 + samples[0][1] % 5}


def loss(model, batch):
    return F.mse_loss(model(batch["x"], batch["way"]), batch["x"].sum(1)) * batch["strength"]


job = ml.Job(
    model=Tide,
    loss=loss,
    optimizer=lambda named: torch.optim.Adam(named, lr=1e-2),
    data=lambda: Waves(34, 6),
    collate=collate,
    shuffle=False,
    batch_size=10,
    steps=30,
    clip_grad_norm=2.0,
)
