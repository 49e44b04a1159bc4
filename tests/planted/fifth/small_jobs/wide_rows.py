"""Rows through layers of 37: averages, two optimizers, frozen layers, logged values, bfloat16, large losses."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import meshloom as ml


def data(n=26, s=0):
    g = torch.Generator().manual_seed(s)
    x = torch.randn(n, 7, generator=g)
    return TensorDataset(x, (x[:, :3].sum(1) > 0).long() + (x[:, 3] > 0.5).long())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(7, 37)
        self.drop = nn.Dropout(0.2)
        self.mid = nn.Linear(37, 37)
        self.norm = nn.LayerNorm(37)
        self.out = nn.Linear(37, 3)

    def forward(self, x):
        return self.out(self.norm(self.drop(torch.relu(self.mid(torch.relu(self.inp(x)))))))


def loss(m, b):
    return nn.functional.cross_entropy(m(b[0]), b[1])


def opt(named):
    w = [p for n, p in named if p.ndim > 1]
    b = [p for n, p in named if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": w, "weight_decay": 0.1}, {"params": b, "weight_decay": 0.0, "lr": 3e-3}], lr=1e-2
    )


def acc(m, b):
    return (m(b[0]).argmax(1) == b[1]).float().mean()


def make(**kw):
    a = {
        "model": Net,
        "loss": loss,
        "optimizer": opt,
        "data": data,
        "batch_size": 8,
        "steps": 40,
        "clip_grad_norm": 0.3,
        "scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
        "evaluate": ml.Evaluate(data=lambda: data(11, 1), metrics={"acc": acc, "val": loss}, every=2),
    }
    a.update(kw)
    return ml.Job(**a)


job = make()
averaged = make(average=0.7)


def two_of_them(named):
    return [
        torch.optim.SGD([p for n, p in named if "mid" in n], lr=0.1, momentum=0.9),
        torch.optim.Adam([p for n, p in named if "mid" not in n], lr=1e-2),
    ]


two_optimizers = make(
    optimizer=two_of_them,
    scheduler=lambda o: [
        torch.optim.lr_scheduler.StepLR(o[0], 2, 0.5),
        torch.optim.lr_scheduler.LambdaLR(o[1], lambda s: 1 / (1 + s)),
    ],
)
by_momentum = make(
    optimizer=lambda named: torch.optim.SGD([p for n, p in named], lr=0.1, momentum=0.9), clip_grad_norm=None
)
frozen = make(frozen={"mid": range(2)}, clip_grad_norm=None)


def logging_loss(m, b):
    y = m(b[0])
    ml.log("acc", (y.argmax(1) == b[1]).float().mean())
    return nn.functional.cross_entropy(y, b[1])


logged = make(loss=logging_loss)


def large_loss(m, b):
    return nn.functional.cross_entropy(m(b[0]), b[1]) * 40.0


overflowing = make(
    loss=large_loss, scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5), clip_grad_norm=None
)
in_bfloat16 = make(
    model=lambda: Net().to(torch.bfloat16),
    loss=lambda m, b: nn.functional.cross_entropy(m(b[0].to(torch.bfloat16)).float(), b[1]),
    optimizer=lambda named: torch.optim.SGD([p for n, p in named], lr=0.1),
    clip_grad_norm=None,
    evaluate=None,
)
