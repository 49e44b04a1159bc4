"""Desks: each sample goes to the best of five experts and to a shared one; two layers of them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Desks(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 5, bias=False)
        self.up = nn.Parameter(torch.randn(5, 16, 22) * 0.2)
        self.shift = nn.Parameter(torch.randn(5, 22) * 0.1)
        self.down = nn.Parameter(torch.randn(5, 22, 16) * 0.2)
        self.shared = nn.Linear(16, 16)

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        best = shares.argmax(-1)
        h = torch.bmm(x.unsqueeze(1), self.up[best]).squeeze(1) + self.shift[best]
        routed = torch.bmm(F.gelu(h).unsqueeze(1), self.down[best]).squeeze(1)
        return self.shared(x) + shares.gather(1, best.unsqueeze(1)) * routed


class Office(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.floors = nn.Linear(7, 16), nn.ModuleList(Desks() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.leave = nn.Linear(16, 3)

    def forward(self, x):
        x = torch.tanh(self.enter(x))
        for norm, floor in zip(self.norms, self.floors, strict=True):
            x = x + floor(norm(x))
        return self.leave(x)


class Letters(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 7, generator=g)
        self.y = self.x @ torch.randn(7, 3, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def loss(model, batch):
    return F.smooth_l1_loss(model(batch[0]), batch[1])


job = ml.Job(
    model=Office,
    loss=loss,
    optimizer=lambda named: torch.optim.Adam(named, lr=1e-2),
    data=lambda: Letters(53, 9),
    batch_size=14,
    steps=30,
    clip_grad_norm=0.5,
    evaluate=ml.Evaluate(data=lambda: Letters(11, 10), metrics={"error": loss}, every=5),
)
