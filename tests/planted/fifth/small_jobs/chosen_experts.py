"""Samples choose one of three experts by their tag, and a batch without a tag does not call its expert."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import meshloom as ml


def data(n=26, s=0):
    g = torch.Generator().manual_seed(s)
    x = torch.randn(n, 5, generator=g)
    tag = (torch.rand(n, generator=g) * 1.35).long() * 1 + (torch.rand(n, generator=g) < 0.2).long()
    return TensorDataset(x, tag.clamp(max=2), x.sum(1, keepdim=True).tanh())


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(5, 11)
        self.experts = nn.ModuleList(nn.Linear(11, 11) for _ in range(3))
        self.head = nn.Linear(11, 1)

    def forward(self, x, tag):
        h = torch.tanh(self.trunk(x))
        out = h
        for i, e in enumerate(self.experts):
            mine = (tag == i).nonzero()[:, 0]
            if len(mine):
                out = out.index_add(0, mine, e(h[mine]))
        return self.head(out)


def loss(m, b):
    return nn.functional.mse_loss(m(b[0], b[1]), b[2])


def make(**kw):
    a = {
        "model": MoE,
        "loss": loss,
        "optimizer": lambda named: torch.optim.AdamW([p for n, p in named], lr=1e-2, weight_decay=0.1),
        "data": data,
        "batch_size": 6,
        "steps": 40,
        "scheduler": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.3, total_iters=5),
        "evaluate": ml.Evaluate(data=lambda: data(9, 1), metrics={"mse": loss}, every=2),
    }
    a.update(kw)
    return ml.Job(**a)


job = make()
