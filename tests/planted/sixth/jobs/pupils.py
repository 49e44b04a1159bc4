"""Pupils: a codebook whose entries follow the data, a moving scale, a queue of what was seen, an optimizer of whole matrices."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Pupil(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.outside = nn.Linear(10, 12), nn.Linear(12, 10)
        self.middle = nn.Linear(12, 12, bias=False)
        self.register_buffer("codes", torch.randn(6, 12) * 0.5)
        self.register_buffer("uses", torch.ones(6))
        self.register_buffer("scale", torch.ones(12))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        h = self.middle(torch.tanh(self.inside(x)))
        near = torch.cdist(h, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                chosen = F.one_hot(near, 6).to(h.dtype)
                self.uses.mul_(0.9).add_(0.1 * chosen.sum(0))
                self.scale.mul_(0.8).add_(0.2 * h.abs().mean(0))
                self.codes.mul_(0.97).add_(0.03 * (chosen.T @ h))
                self.steps += 1
        h = h / (0.5 + self.scale) + 0.3 * self.codes[near]
        return self.outside(h)


class Tasks(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        self.x = torch.randn(n, 10, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


def loss(model, batch):
    return F.mse_loss(model(batch), batch.flip(1))


class Whitened(torch.optim.Optimizer):
    """Steps along the sign-like factor of each matrix: all elements of one look at each other."""

    def __init__(self, params, lr=0.02, momentum=0.7):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                state = self.state[each]
                if not state:
                    state["mean"] = torch.zeros_like(each)
                mean = state["mean"].mul_(group["momentum"]).add_(each.grad)
                each.sub_(group["lr"] * mean / (mean.norm() + 1e-6) * each.numel() ** 0.5)


job = ml.Job(
    model=Pupil,
    loss=loss,
    optimizer=lambda named: torch.optim.Adamax(named, lr=1e-2),
    data=lambda: Tasks(38, 5),
    batch_size=11,
    steps=30,
    average=0.9,
    evaluate=ml.Evaluate(data=lambda: Tasks(9, 6), metrics={"mse": loss}, every=4),
)
whole = replace(
    job,
    average=None,
    clip_grad_norm=0.3,
    optimizer=lambda named: [
        Whitened([each for each in named if each[1].ndim > 1]),
        torch.optim.SGD([each for each in named if each[1].ndim < 2], lr=0.05, momentum=0.5),
    ],
)
