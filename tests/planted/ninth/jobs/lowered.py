"""Jobs for lower precisions."""

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


def small_steps():
    """Updates of far less than a digit of bfloat16."""
    return job(optimizer=lambda named: torch.optim.SGD(named, lr=0.01, momentum=0.5), steps=12)


def adam():
    return job(optimizer=lambda named: torch.optim.AdamW(named, lr=0.003), steps=8)


def overflowing():
    """Gradients of a large loss overflow float16 until the scale is small."""

    def large_loss(model, batch):
        return 300.0 * F.mse_loss(model(batch[0]), batch[1])

    return job(
        loss=large_loss, optimizer=lambda named: torch.optim.SGD(named, lr=1e-4, momentum=0.9), steps=14
    )


def statistics():
    """Batch norm without parameters; its statistics move slowly."""

    def model():
        return nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13, affine=False, momentum=0.003), nn.Tanh(), nn.Linear(13, 9), nn.Tanh(), nn.Linear(9, 3))  # fmt: skip

    held_out = ml.Evaluate(data=lambda: numbers(20, seed=9), metrics={"error": loss}, every=5)
    return job(
        model=model, evaluate=held_out, steps=10, optimizer=lambda named: torch.optim.SGD(named, lr=0.05)
    )


class Adapted(nn.Module):
    """A frozen matrix with a trained low-rank addition, several times."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(13, 13)
        self.down = nn.Linear(13, 5, bias=False)
        self.up = nn.Linear(5, 13)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return x + torch.tanh(self.frozen(x) + self.up(self.down(x)))


def adapters():
    def model():
        return nn.Sequential(nn.Linear(7, 13), Adapted(), Adapted(), Adapted(), nn.Linear(13, 3))

    return job(model=model, optimizer=lambda named: torch.optim.AdamW(named, lr=0.01), steps=5)
