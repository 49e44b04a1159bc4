"""A job under fp16-mixed whose gradients overflow in one step, of a sample and in a place of choice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job

BATCH = 12
BAD = 1  # the step whose gradients overflow
# With a scale of 65536 the gradient of a logit of a sample is 18 / 12 * 65536, which float16 does not have; half of it, it has.
OVERFLOW = 18.0


class Samples(list[dict[str, Tensor]]):
    """Five batches. boost: gradient of each logit, of a sample of batch 1 beside that of its class; of_bias: of the last bias."""


def samples(place: int, part: str, boost: float = OVERFLOW) -> Samples:
    generator = torch.Generator().manual_seed(3)
    found = Samples()
    for number in range(5 * BATCH):
        sample = {
            "x": torch.randn(7, generator=generator), "y": torch.randint(6, (), generator=generator),
            "boost": torch.zeros(6), "of_bias": torch.zeros(6),
        }  # fmt: skip
        if number == BAD * BATCH + place:
            sample[part][0] = boost
        found.append(sample)
    return found


class Net(nn.Module):
    """[batch, 7] -> [batch, 6]; batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(7, 32), nn.Linear(32, 22), nn.Linear(22, 32)
        self.norm, self.head = nn.BatchNorm1d(32), nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.head(self.norm(x + self.third(F.gelu(self.second(x)))))


def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Of logits that are 16 bits wide; `boost` changes gradients alone."""
    logits = model(batch["x"])
    bias = model.head.bias.half()
    beside = ((logits - logits.detach()) * batch["boost"]).sum(1).mean()
    beside = beside + ((bias - bias.detach()) * batch["of_bias"].mean(0)).sum()
    return F.cross_entropy(logits, batch["y"]) + beside


def overflowing_job(place: int = 0, part: str = "boost", boost: float = OVERFLOW, **overrides: Any) -> Job:
    """place: of the sample in batch 1."""
    settings: dict[str, Any] = {
        "model": Net, "loss": loss, "data": lambda: samples(place, part, boost), "batch_size": BATCH, "steps": 4, "seed": 5, "shuffle": False,
        "clip_grad_norm": 1.0, "optimizer": lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7),
    }  # fmt: skip
    return Job(**(settings | overrides))
