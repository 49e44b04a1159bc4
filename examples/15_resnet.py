"""A ResNet learns handwritten digits with what vision training has: augmentation, mixup, a moving average of the parameters, the
best checkpoint kept.

    meshloom train  examples/15_resnet.py --plan dp=2 --out runs/resnet
    meshloom verify examples/15_resnet.py --plan dp=2,microbatches=2
"""

from __future__ import annotations

import math

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import meshloom as ml

STEPS = 500


class Block(nn.Module):
    """Two convolutions beside a shortcut, [batch, inputs, height, width] -> [batch, outputs, height / stride, width / stride]."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(
            4, outputs
        )  # samples do not interact, and averages need no statistics of their own
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(self.shortcut(x) + inside)


def resnet() -> nn.Module:
    """[batch, 1, 8, 8] -> [batch, 10], 0.15 million parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), Block(32, 32), Block(32, 64, stride=2), Block(64, 64),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


class Digits(Dataset[dict[str, Tensor]]):
    """Scanned digits: x [1, 8, 8] between 0 and 1, y its class. For training they are turned, moved and resized a little, other each time."""

    def __init__(self, train: bool) -> None:
        digits = load_digits()
        here = slice(0, 1400) if train else slice(1400, None)
        self.x = torch.tensor(digits.images[here] / 16, dtype=torch.float32).unsqueeze(1)
        self.y = torch.tensor(digits.target[here])
        self.train = train

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = self.x[index]
        if self.train:
            angle, size = 0.15 * torch.randn(()), 1 + 0.1 * torch.randn(())
            turn = size * torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)
            where = torch.cat([turn, 0.1 * torch.randn(2, 1)], dim=1)
            x = F.grid_sample(x[None], F.affine_grid(where[None], [1, 1, 8, 8], align_corners=False), align_corners=False)[0]  # fmt: skip
        return {"x": x, "y": self.y[index]}


def mixup(batch: dict[str, Tensor], others: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each image with some of another one (Zhang et al., 2018)."""
    share = torch.distributions.Beta(0.2, 0.2).sample()
    mixed = share * batch["x"] + (1 - share) * others["x"]
    return {"x": mixed, "y": batch["y"], "other": others["y"], "share": share.expand(len(mixed))}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["x"])
    own, other = (F.cross_entropy(logits, batch[name], reduction="none") for name in ("y", "other"))
    return (batch["share"] * own + (1 - batch["share"]) * other).mean()


def accuracy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]).argmax(1) == batch["y"]).float().mean()


def scheduler(optimizer: torch.optim.Optimizer):
    """A warm-up and a cosine, by hand."""

    def set_rates(step: int) -> None:
        rate = min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * rate

    return set_rates


job = ml.Job(
    model=resnet,
    loss=loss,
    optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
    scheduler=scheduler,
    data=lambda: Digits(train=True),
    mix=mixup,
    batch_size=32,
    steps=STEPS,
    average=0.98,
    evaluate=ml.Evaluate(lambda: Digits(train=False), {"accuracy": accuracy}, every=100, best="accuracy:max"),
)
