"""Several losses that take turns: a critic and a generator, an actor and its critic."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import meshloom as ml


def points(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(count, 3, generator=generator), torch.randn(count, 5, generator=generator)
    )


class GAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            OrderedDict(first=nn.Linear(5, 17), act=nn.SiLU(), drop=nn.Dropout(0.3), last=nn.Linear(17, 3))
        )
        self.critic = nn.Sequential(OrderedDict(first=nn.Linear(3, 13), act=nn.SiLU(), last=nn.Linear(13, 1)))


def critic_loss(model, batch):
    real, noise = batch
    return (
        F.softplus(-model.critic(real)).mean()
        + F.softplus(model.critic(model.generator(noise).detach())).mean()
    )


def generator_loss(model, batch):
    return F.softplus(-model.critic(model.generator(batch[1]))).mean()


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(OrderedDict(first=nn.Linear(5, 11), act=nn.Tanh(), last=nn.Linear(11, 3)))
        self.critic = nn.Sequential(OrderedDict(first=nn.Linear(5, 9), act=nn.Tanh(), last=nn.Linear(9, 1)))


def actor_loss(model, batch):
    wanted, seen = batch
    advantage = wanted[:, 0] - model.critic(seen)[:, 0]
    return -(advantage * F.log_softmax(model.actor(seen), 1)[:, 1]).mean()


def value_loss(model, batch):
    wanted, seen = batch
    return (model.critic(seen)[:, 0] - wanted[:, 0]).square().mean()


def adam(named):
    return torch.optim.Adam([each for _, each in named], lr=1e-2)


def two(named):
    weights = [each for _, each in named if each.ndim > 1]
    biases = [each for _, each in named if each.ndim <= 1]
    return [torch.optim.AdamW(weights, lr=1e-2), torch.optim.SGD(biases, lr=0.1)]


common = {"data": lambda: points(40, 1), "batch_size": 10, "steps": 30}
pair = ml.Job(
    model=GAN,
    losses={
        "critic": ml.Objective(loss=critic_loss, optimizer=two, parameters="critic", updates=2),
        "generator": ml.Objective(
            loss=generator_loss, optimizer=adam, parameters="generator", clip_grad_norm=0.1
        ),
    },
    **common,
)
seldom = ml.Job(
    model=GAN,
    losses={
        "critic": ml.Objective(loss=critic_loss, optimizer=adam, parameters="critic", every=2),
        "generator": ml.Objective(loss=generator_loss, optimizer=adam, parameters="generator"),
    },
    **common,
)
actor = ml.Job(
    model=Actor,
    losses={
        "actor": ml.Objective(loss=actor_loss, optimizer=adam, parameters="actor"),
        "critic": ml.Objective(loss=value_loss, optimizer=adam, parameters="critic"),
    },
    **common,
)
