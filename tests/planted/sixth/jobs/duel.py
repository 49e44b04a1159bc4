"""A duel: a painter and a judge with losses of their own, in turn."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Duel(nn.Module):
    def __init__(self):
        super().__init__()
        self.painter = nn.Sequential(nn.Linear(5, 18), nn.BatchNorm1d(18), nn.ReLU(), nn.Linear(18, 9))
        self.judge = nn.Sequential(nn.Linear(9, 15), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(15, 1))


class Strokes(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        self.x = torch.randn(n, 9, generator=torch.Generator().manual_seed(seed)).cumsum(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


def judged(model, batch):
    painted = model.painter(torch.randn(len(batch), 5, dtype=batch.dtype)).detach()
    real, made = model.judge(batch), model.judge(painted)
    return F.softplus(-real).mean() + F.softplus(made).mean()


def painted(model, batch):
    return F.softplus(-model.judge(model.painter(torch.randn(len(batch), 5, dtype=batch.dtype)))).mean()


def fooled(model, batch):
    return (model.judge(model.painter(batch[:, :5])) > 0).float().mean()


job = ml.Job(
    model=Duel,
    losses={
        "judge": ml.Objective(
            loss=judged,
            optimizer=lambda named: torch.optim.Adam(named, lr=5e-3, betas=(0.0, 0.9)),
            parameters="judge",
            updates=2,
            clip_grad_norm=0.4,
        ),
        "painter": ml.Objective(
            loss=painted,
            optimizer=lambda named: torch.optim.RMSprop(named, lr=3e-3),
            parameters="painter",
            scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.8),
        ),
    },
    data=lambda: Strokes(38, 3),
    batch_size=10,
    steps=30,
    evaluate=ml.Evaluate(data=lambda: Strokes(7, 4), metrics={"fooled": fooled}, every=3),
)
