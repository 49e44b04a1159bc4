"""Multilayer perceptrons with what optimizers and schedules may have."""

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


def numbers(samples=40, inputs=7, outputs=3, seed=2):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, inputs, generator=g)
    return torch.utils.data.TensorDataset(x, torch.sin(x @ torch.randn(inputs, outputs, generator=g)))


def mlp(width=13):
    return nn.Sequential(
        nn.Linear(7, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)
    )


def loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def job(**changes):
    settings = {
        "model": mlp, "loss": loss, "optimizer": lambda named: torch.optim.AdamW(named, lr=0.01), "data": numbers, "batch_size": 10,
        "steps": 8,
    }  # fmt: skip
    return ml.Job(**{**settings, **changes})


def adam():
    return job()


def momentum():
    return job(optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9), batch_size=12)


def clipped():
    return job(clip_grad_norm=0.05, optimizer=lambda named: torch.optim.SGD(named, lr=0.5))


def adagrad():
    return job(optimizer=lambda named: torch.optim.Adagrad(named, lr=0.05, initial_accumulator_value=0.2))


def averaged():
    held_out = ml.Evaluate(data=lambda: numbers(22, seed=9), metrics={"error": loss}, every=3)
    return job(
        average=0.9, evaluate=held_out, steps=10, optimizer=lambda named: torch.optim.AdamW(named, lr=0.05)
    )


def short():
    """The last batch of each epoch has 4 samples of 12."""
    return job(batch_size=12, steps=9, optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.5))


def lbfgs():
    return job(optimizer=lambda named: torch.optim.LBFGS(named, lr=0.3, max_iter=4, history_size=3), steps=5)


def wide_lbfgs():
    return job(model=lambda: mlp(48), optimizer=lambda named: torch.optim.LBFGS(named, lr=0.3, max_iter=4, history_size=3), steps=5)  # fmt: skip


def thawing():
    """The middle layer is frozen twice, under two names."""
    return job(frozen={"2.weight": range(2), "2": range(4, 7)}, optimizer=lambda named: torch.optim.SGD(named, lr=0.3, momentum=0.9), steps=10)  # fmt: skip


def weighted():
    """A mean over weights, which are small."""

    def of_weights(model, batch):
        weight = 0.02 * batch[0][:, 0].abs()
        return (weight * ((model(batch[0]) - batch[1]) ** 2).mean(1)).sum(), weight.sum()

    return job(loss=of_weights, optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9))


def two_losses():
    """Two halves with losses, optimizers and schedules of their own; the second loss comes twice a step."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = mlp(11), mlp(9)

    def of(half):
        return lambda model, batch: F.mse_loss(getattr(model, half)(batch[0]), batch[1])

    def objective(half, updates):
        return ml.Objective(
            loss=of(half), parameters=half, updates=updates,
            optimizer=lambda named: torch.optim.SGD(named, lr=0.2, momentum=0.9),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.3),
        )  # fmt: skip

    losses = {"first": objective("first", 1), "second": objective("second", 2)}
    return ml.Job(model=Pair, losses=losses, data=numbers, batch_size=10, steps=9)


def large():
    """17 MiB of parameters."""

    def model():
        return nn.Sequential(nn.Linear(7, 1403), nn.Tanh(), nn.Linear(1403, 1801), nn.Tanh(), nn.Linear(1801, 1001), nn.Tanh(), nn.Linear(1001, 3))  # fmt: skip

    return job(model=model, batch_size=4, steps=3, optimizer=lambda named: torch.optim.Adam(named, lr=1e-3))
