"""Two losses that take turns, one of them with an optimizer of whole matrices."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Points(torch.utils.data.Dataset):
    def __init__(self, num_samples, seed):
        generator = torch.Generator().manual_seed(seed)
        angle = 6.28 * torch.rand(num_samples, generator=generator)
        self.x = torch.stack([angle.cos(), angle.sin(), angle.cos() * angle.sin()], 1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index]


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(3, 11), nn.SiLU(), nn.Linear(11, 1))
        self.generator = nn.Sequential(nn.Linear(4, 11), nn.SiLU(), nn.Linear(11, 3))

    def fake(self, like):
        return self.generator(torch.randn(len(like), 4, dtype=like.dtype, device=like.device))


def critic_loss(model, batch):
    return (
        F.softplus(model.critic(model.fake(batch).detach())).mean() + F.softplus(-model.critic(batch)).mean()
    )


def generator_loss(model, batch):
    return F.softplus(-model.critic(model.fake(batch))).mean()


def off(model, batch):
    return (model.critic(batch) - 0.3).square().mean()


job = ml.Job(
    model=Gan,
    losses={
        "critic": ml.Objective(
            loss=critic_loss,
            optimizer=lambda named: torch.optim.Adam([p for _, p in named], lr=1e-2),
            parameters="critic",
            updates=2,
            clip_grad_norm=0.5,
        ),
        "generator": ml.Objective(
            loss=generator_loss,
            optimizer=lambda named: torch.optim.Adafactor([p for _, p in named], lr=2e-2),
            parameters="generator",
            every=2,
        ),
    },
    data=lambda: Points(21, 1),
    batch_size=8,
    steps=40,
    evaluate=ml.Evaluate(lambda: Points(9, 2), {"off": off}, every=4),
    checkpoint_every=4,
    keep_checkpoints=20,
)
