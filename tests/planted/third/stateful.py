"""Jobs of the third list with experts, state in attributes and buffers, and two losses."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml
from tests.planted.third.plain import residual, vector
from tests.planted.third.sequences import Rows

# experts, some of which a replica may not use.


class Experts(nn.Module):
    def __init__(self, hard):
        super().__init__()
        self.inp, self.gate = nn.Linear(7, 12), nn.Linear(12, 3)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(12, 17), nn.GELU(), nn.Linear(17, 12)) for _ in range(3)]
        )
        self.norm, self.out = nn.LayerNorm(12), nn.Linear(12, 3)
        self.hard = hard

    def forward(self, x):
        x = self.inp(x)
        share = self.gate(x).softmax(-1)
        if self.hard:
            best, y = share.argmax(-1), torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows = (best == number).nonzero()[:, 0]
                if len(rows):
                    y = y.index_add(0, rows, expert(x[rows]) * share[rows, number, None])
        else:
            y = sum(expert(x) * share[:, number, None] for number, expert in enumerate(self.experts))
        ml.log("gate", share[:, 0].mean())
        return self.out(self.norm(x + y))


def experts(hard=False):
    return residual(
        model=lambda: Experts(hard),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=5e-3, weight_decay=0.05),
        scheduler=None,
        clip_grad_norm=None,
    )


class Rare(nn.Module):
    """A head that only batches with a flagged sample use."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 11), nn.Tanh())
        self.rare, self.out = nn.Linear(11, 11), nn.Linear(11, 3)

    def forward(self, x):
        h = self.body(x)
        if bool((x[:, 0] > 1.0).any()):
            h = h + 0.5 * self.rare(h)
        return self.out(h)


def rare():
    return residual(
        model=Rare,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=5e-3, weight_decay=0.05),
        scheduler=None,
        batch_size=6,
    )


# state in attributes and buffers.


class Carrying(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.cell, self.out = nn.Linear(7, 9), nn.GRUCell(9, 9), nn.Linear(9, 3)
        self.hidden = None
        self.calls = 0

    def forward(self, x):
        h = (
            self.hidden
            if self.hidden is not None and self.hidden.shape[0] == x.shape[0]
            else x.new_zeros(x.shape[0], 9)
        )
        h = self.cell(torch.tanh(self.inp(x)), h)
        if self.training:
            self.hidden = h.detach()
            self.calls += 1
        return self.out(h)


def carrying():
    return residual(
        model=Carrying,
        optimizer=lambda named: torch.optim.Adam([p for _, p in named], lr=5e-3),
        scheduler=None,
        shuffle=False,
        data=lambda: Rows(24, vector),
        batch_size=8,
    )


class Buffered(nn.Module):
    """A running scale that forwards read, a counter, and a queue of the newest rows."""

    def __init__(self):
        super().__init__()
        self.inp, self.mid, self.out = nn.Linear(7, 9), nn.Linear(9, 9), nn.Linear(9, 3)
        self.register_buffer("scale", torch.ones(9))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("newest", torch.zeros(2, 9))

    def forward(self, x):
        h = torch.tanh(self.inp(x))
        if self.training:
            with torch.no_grad():
                self.scale.mul_(0.8).add_(0.2 * h.abs().mean(0))
                self.count.add_(1)
                self.newest.copy_(h[-2:] if len(h) > 1 else h.expand(2, -1))
        return self.out(torch.relu(self.mid(h / (self.scale + 0.5))) + self.newest.mean(0))


def buffered():
    return residual(
        model=Buffered,
        optimizer=lambda named: torch.optim.Adam([p for _, p in named], lr=5e-3),
        scheduler=None,
    )


# two losses.


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.gen = nn.Sequential(nn.Linear(4, 11), nn.Tanh(), nn.Linear(11, 7))
        self.critic = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Dropout(0.2), nn.Linear(13, 1))


def critic_loss(model, batch):
    fake = model.gen(torch.randn(len(batch["x"]), 4, device=batch["x"].device, dtype=batch["x"].dtype))
    return F.softplus(model.critic(fake.detach())).mean() + F.softplus(-model.critic(batch["x"])).mean()


def gen_loss(model, batch):
    fake = model.gen(torch.randn(len(batch["x"]), 4, device=batch["x"].device, dtype=batch["x"].dtype))
    return F.softplus(-model.critic(fake)).mean()


def realness(model, batch):
    return model.critic(batch["x"]).mean()


def gan():
    return ml.Job(
        model=Two,
        losses={
            "critic": ml.Objective(
                loss=critic_loss,
                optimizer=lambda named: torch.optim.Adam([p for _, p in named], lr=5e-3),
                parameters="critic",
                updates=2,
                clip_grad_norm=0.5,
            ),
            "gen": ml.Objective(
                loss=gen_loss,
                optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9),
                parameters="gen",
                every=2,
                scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.7),
            ),
        },
        data=lambda: Rows(26, vector),
        batch_size=11,
        steps=12,
        seed=1,
        evaluate=ml.Evaluate(data=lambda: Rows(9, vector), metrics={"realness": realness}, every=2),
    )
