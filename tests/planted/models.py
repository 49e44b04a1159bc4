"""Models in which more can go wrong: a small branch, averages in buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from tests.jobs import vectors


class Scaled(nn.Module):
    """[batch, 7] -> [batch, 5]; a branch is scaled by 1e-6, as LayerScale does at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 6)
        self.branch = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.full((6,), 1e-6))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.head(x + self.scale * torch.tanh(self.branch(x)))


class Centred(nn.Module):
    """[batch, 7] -> [batch, 5]; a moving average of activations is written and not read, beside a huge mask, a counter and
    infinities."""

    average: Tensor
    seen: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 6)
        self.head = nn.Linear(6, 5)
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([0.0, -1e9, float("-inf"), float("nan")]))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
                self.seen.add_(1)
        return self.head(x)


class Augmented(torch.utils.data.Dataset[Any]):
    """Vectors with a draw of their own."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        sample = vectors()[index]
        return {**sample, "x": sample["x"] + torch.randn(7)}


class Lines(IterableDataset[Any]):
    """Vectors one after another, each epoch in another order."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        for index in range(30):
            yield vectors()[(index + 7 * self.epoch) % 30]


MORE_MODELS: dict[str, dict[str, Any]] = {
    "scaled": {"model": Scaled},
    "centred": {"model": Centred},
    "augmented": {"data": Augmented},
    "lines": {"data": Lines},
    "averaged": {"average": 0.9},
}
