"""A critic that is updated twice a step, and a generator that has its turn in every second one."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Dropout(0.1), nn.Linear(20, 9))
        self.critic = nn.Sequential(nn.Linear(9, 22), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(22, 1))


class Real(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        self.x = torch.randn(n, 9, generator=torch.Generator().manual_seed(seed)) * 0.5 + 1

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


def critic(model, x):
    fake = model.generator(torch.randn(len(x), 6)).detach()
    return F.softplus(-model.critic(x)).mean() + F.softplus(model.critic(fake)).mean()


def generator(model, x):
    return F.softplus(-model.critic(model.generator(torch.randn(len(x), 6)))).mean()


def score(model, x):
    return model.critic(x).mean()


job = ml.Job(
    model=Gan,
    data=lambda: Real(21, 0),
    batch_size=8,
    steps=40,
    losses={
        "critic": ml.Objective(
            loss=critic,
            optimizer=lambda n: torch.optim.Adam(n, lr=4e-3, betas=(0.5, 0.9)),
            parameters="critic",
            updates=2,
            clip_grad_norm=0.7,
        ),
        "generator": ml.Objective(
            loss=generator,
            optimizer=lambda n: torch.optim.SGD(n, lr=2e-2, momentum=0.9),
            parameters="generator",
            every=2,
            scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.8),
        ),
    },
    evaluate=ml.Evaluate(data=lambda: Real(7, 1), metrics={"score": score}, every=5),
)
