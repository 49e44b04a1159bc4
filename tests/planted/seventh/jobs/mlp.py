"""Perceptrons of odd sizes on rows of numbers: dropout, clipping, frozen parts, averages, float16, whole-matrix updates."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import meshloom as ml

FEATURES, CLASSES = 29, 5


def rows(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (count,), generator=generator))


class Net(nn.Module):
    def __init__(self, rate: float = 0.2) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, 23)
        self.drop = nn.Dropout(rate)
        self.mid = nn.Linear(23, 61)
        self.norm = nn.LayerNorm(61)
        self.out = nn.Linear(61, CLASSES)

    def forward(self, x):
        x = self.drop(torch.tanh(self.inp(x)))
        return self.out(torch.tanh(self.norm(self.mid(x))))


class Tuned(nn.Module):
    """A stem and an inner layer that are never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, 23)
        self.inner = nn.Linear(23, 19)
        self.mid = nn.Linear(19, 17)
        self.out = nn.Linear(17, CLASSES)
        for each in (self.stem, self.inner):
            each.requires_grad_(False)

    def forward(self, x):
        x = torch.relu(self.inner(torch.tanh(self.stem(x))))
        return self.out(torch.tanh(self.mid(x)))


class Gained(nn.Module):
    """Net, and a number whose gradient is always the same."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(0.0)
        self.gain = nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return self.net(x), self.gain(torch.ones_like(x[:, :1]))


def mean_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def weighted_loss(model, batch):
    weights = 1.0 + batch[1].float()
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (losses * weights).sum(), weights.sum()


def overflowing_loss(model, batch):
    logits, gain = model(batch[0])
    return 0.05 * F.cross_entropy(logits, batch[1]) + 3.0 * gain.float().mean()


def accuracy(model, batch):
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


def gained_metric(model, batch):
    logits, gain = model(batch[0])
    return F.cross_entropy(logits, batch[1]) + gain.float().mean()


def groups(named):
    decayed = [each for _, each in named if each.ndim > 1]
    others = [each for _, each in named if each.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2
    )


def by_hand(optimizer):
    def set_rates(step):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)

    return set_rates


common = {
    "model": Net,
    "loss": mean_loss,
    "optimizer": groups,
    "data": lambda: rows(53, 1),
    "batch_size": 12,
    "steps": 30,
}
held_out = {"data": lambda: rows(17, 2), "every": 1, "batch_size": 6}

plain = ml.Job(**common)
clipped = ml.Job(**common, clip_grad_norm=0.05, scheduler=by_hand)
weighted = ml.Job(**{**common, "loss": weighted_loss}, clip_grad_norm=1.0)
uneven = ml.Job(**{**common, "batch_size": 13})
unfrozen = ml.Job(**common, frozen={"inp": range(2), "inp.bias": range(3, 9)})
resting = ml.Job(**common, frozen={"mid.weight": range(9)})
averaged = ml.Job(
    **common, average=0.5, evaluate=ml.Evaluate(metrics={"loss": mean_loss, "accuracy": accuracy}, **held_out)
)
tuned = ml.Job(**{**common, "model": Tuned})
overflowing = ml.Job(
    **{
        **common,
        "model": Gained,
        "loss": overflowing_loss,
        "optimizer": lambda named: torch.optim.Adam([each for _, each in named], lr=0.05),
    },
    average=0.5,
    evaluate=ml.Evaluate(metrics={"loss": gained_metric}, **held_out),
)
whole = ml.Job(
    **{**common, "optimizer": lambda named: torch.optim.Adafactor([each for _, each in named], lr=0.05)}
)
background = ml.Job(**common, checkpoint="background", checkpoint_every=1)
