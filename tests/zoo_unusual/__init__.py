"""Unusual jobs that are right: infinite and huge numbers, parts in other precisions, parts that come and go, state of many kinds, rare
loops. Verification must not say of any that it differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal

WIDTH, CLASSES = 9, 5
VECTORS = {"x": normal(901, 7), "y": integers(902, CLASSES)}
TEXTS = {"x": integers(903, 23, 7), "y": integers(904, 23, 7)}
PICTURES = {"x": normal(905, 3, 7, 7), "y": integers(906, CLASSES)}


def classes(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def tokens(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]).transpose(1, 2), batch["y"])


def unusual(
    model: Callable[[], nn.Module], loss: Callable[..., Any] = classes, data: Any = VECTORS, **given: Any
) -> Job:
    """A job of three epochs of four steps."""
    return job_of(model, loss, data, **{"batch_size": 6, "steps": 12, **given})


class Around(nn.Module):
    """[batch, 7] -> what is inside, [batch, 9] -> [batch, 9] -> [batch, 5]"""

    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(7, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.inside = nn.Sequential(*inside)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inside(self.into(x).tanh()))


class Layer(nn.Module):
    """x + w2 gelu(w1 norm(x)) with whatever `scaled` makes of it."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def scaled(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scaled(self.dropout(self.down(F.gelu(self.up(self.norm(x))))))
