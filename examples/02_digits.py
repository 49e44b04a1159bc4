"""A small convolutional network with batch norm and dropout reads handwritten digits.

    meshloom train  examples/02_digits.py --plan dp=4
    meshloom train  examples/02_digits.py --plan dp=4,sync_batch_norm=true
    meshloom verify examples/02_digits.py --plan dp=4,sync_batch_norm=true

Batch norm makes the samples of a batch depend on each other: by default each replica normalises with its own
samples, and with sync_batch_norm=true all replicas normalise with all of them, as one device would.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import meshloom as ml


class Digits(Dataset[dict[str, Tensor]]):
    """1797 digits, of which every fifth is held out. image: float [1, 8, 8] from 0 to 1; digit: int64, 0 to
    9."""

    def __init__(self, train: bool) -> None:
        digits = load_digits()
        chosen = (torch.arange(len(digits.target)) % 5 != 0) == train
        self.images = torch.tensor(digits.images, dtype=torch.float32)[chosen].unsqueeze(1) / 16
        self.digits = torch.tensor(digits.target)[chosen]

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.images[index], "digit": self.digits[index]}


def convolutional_network() -> nn.Module:
    """Images [batch, 1, 8, 8] -> logits [batch, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(32 * 4 * 4, 10),
    )


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy."""
    return F.cross_entropy(model(batch["image"]), batch["digit"])


def accuracy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Share of digits read correctly."""
    return (model(batch["image"]).argmax(1) == batch["digit"]).float().mean()


job = ml.Job(
    model=convolutional_network,
    loss=loss,
    optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, weight_decay=1e-4),
    data=lambda: Digits(train=True),
    batch_size=64,
    steps=230,  # ten times through the data
    evaluate=ml.Evaluate(lambda: Digits(train=False), {"accuracy": accuracy}, every=50),
)
