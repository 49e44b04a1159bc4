"""A job file that parses the words it is started with, as scripts do: while it is loaded, and again when its
model is built."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import meshloom as ml


def words() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, words().batch), nn.Tanh(), nn.Linear(words().batch, 1))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


print(f"{Path(sys.argv[0]).name} sees {' '.join(sys.argv[1:])}", file=sys.stderr)
job = ml.Job(
    model=model,
    loss=loss,
    optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    data=lambda: list(torch.linspace(-1, 1, 72).reshape(24, 3)),
    batch_size=words().batch,
    steps=words().steps,
)
