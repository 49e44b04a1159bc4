"""A recurrent encoder and decoder; matrices by an optimizer of whole parameters, vectors by AdamW."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import meshloom as ml


def data(n=26, s=0):
    g = torch.Generator().manual_seed(s)
    x = torch.randn(n, 5, 3, generator=g)
    return TensorDataset(x, x.flip(1).cumsum(1))


class Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.GRU(3, 7, batch_first=True)
        self.dec = nn.GRU(3, 7, batch_first=True)
        self.out = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x, y):
        _, h = self.enc(x)
        start = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], 1)
        return self.scale * self.out(self.dec(start, h)[0])


class Normed(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05, beta=0.8):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s["m"] = torch.zeros_like(p)
                s["m"].mul_(group["beta"]).add_(p.grad)
                p.sub_(group["lr"] * s["m"] / (s["m"].norm() + 1e-6))


def loss(m, b):
    return nn.functional.mse_loss(m(b[0], b[1]), b[1])


def opt(named):
    return [
        Normed([p for n, p in named if p.ndim > 1]),
        torch.optim.AdamW([p for n, p in named if p.ndim < 2], lr=1e-2),
    ]


def make(**kw):
    a = {
        "model": Seq,
        "loss": loss,
        "optimizer": opt,
        "data": data,
        "batch_size": 6,
        "steps": 40,
        "evaluate": ml.Evaluate(data=lambda: data(7, 1), metrics={"mse": loss}, every=2),
    }
    a.update(kw)
    return ml.Job(**a)


job = make()
whole = make(optimizer=lambda named: Normed([p for n, p in named]))
