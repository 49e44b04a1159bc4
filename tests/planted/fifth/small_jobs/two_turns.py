"""A generator and its judge in turn, each with an optimizer and a largest norm of its own."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import meshloom as ml


def data(n=26, s=0):
    g = torch.Generator().manual_seed(s)
    a = 6.28 * torch.rand(n, generator=g)
    return TensorDataset(torch.stack([a.cos(), a.sin()], 1))


class GAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.gen = nn.Sequential(nn.Linear(3, 13), nn.Tanh(), nn.Linear(13, 2))
        self.dis = nn.Sequential(nn.Linear(2, 13), nn.Tanh(), nn.Dropout(0.1), nn.Linear(13, 1))

    def fake(self, x):
        return self.gen(torch.randn(len(x), 3, dtype=x.dtype))


sp = nn.functional.softplus


def d(m, b):
    return (sp(m.dis(m.fake(b[0]).detach())) + sp(-m.dis(b[0]))).mean()


def g(m, b):
    return sp(-m.dis(m.fake(b[0]))).mean()


def adam(named):
    return torch.optim.Adam([p for n, p in named], lr=1e-2)


def make():
    return ml.Job(
        model=GAN,
        losses={
            "d": ml.Objective(loss=d, optimizer=adam, parameters="dis", clip_grad_norm=0.1),
            "g": ml.Objective(
                loss=g,
                optimizer=lambda named: torch.optim.SGD([p for n, p in named], lr=0.1),
                parameters="gen",
                clip_grad_norm=0.01,
            ),
        },
        data=data,
        batch_size=8,
        steps=40,
        evaluate=ml.Evaluate(
            data=lambda: data(11, 1),
            metrics={"far": lambda m, b: (m.fake(b[0]).norm(dim=1) - 1).abs().mean()},
            every=2,
        ),
    )


job = make()
