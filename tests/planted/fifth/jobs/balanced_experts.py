"""Experts by index with a loss and a buffer that balance them, and attention of learned queries."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml

E, D = 5, 12


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.up, self.down = (
            nn.Parameter(torch.randn(E, D, 16) * 0.2),
            nn.Parameter(torch.randn(E, 16, D) * 0.2),
        )
        self.register_buffer("load", torch.zeros(E))

    def forward(self, x):
        flat = x.flatten(0, 1)
        scores = self.gate(flat).softmax(-1)
        weight, pick = (scores + 0.1 * self.load.detach()).max(-1)
        h = F.gelu(torch.bmm(flat[:, None], self.up[pick]))
        y = torch.bmm(h, self.down[pick])[:, 0] * weight[:, None]
        share = F.one_hot(pick, E).float().mean(0)
        if self.training:
            with torch.no_grad():
                self.load.lerp_(share, 0.2)
        return y.view_as(x), (share * scores.mean(0)).sum() * E


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.moe, self.norm = nn.Linear(6, D), Moe(), nn.RMSNorm(D)
        self.cross = nn.MultiheadAttention(D, 3, batch_first=True, dropout=0.1)
        self.query, self.head = nn.Parameter(torch.randn(4, D)), nn.Linear(D, 7)

    def forward(self, x):
        x = self.enter(x)
        y, aux = self.moe(self.norm(x))
        q, _ = self.cross(self.query.expand(len(x), -1, -1), x + y, x + y, need_weights=False)
        return self.head(q), aux


class Rows(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x, self.y = torch.randn(n, 5, 6, generator=g), torch.randint(0, 7, (n, 4), generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def loss(model, batch):
    out, aux = model(batch[0])
    return F.cross_entropy(out.transpose(1, 2), batch[1]) + 0.05 * aux


def ce(model, batch):
    return F.cross_entropy(model(batch[0])[0].transpose(1, 2), batch[1])


job = ml.Job(
    model=Model,
    loss=loss,
    optimizer=lambda named: torch.optim.Adam(named, lr=4e-3),
    data=lambda: Rows(18, 0),
    batch_size=8,
    steps=40,
    scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(1.0, (s + 1) / 8)),
    evaluate=ml.Evaluate(data=lambda: Rows(10, 1), metrics={"ce": ce}, every=5),
)
