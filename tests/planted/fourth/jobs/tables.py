"""A classifier of numbers under several optimizers and schedules, with averages, logs and frozen parts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Rows(torch.utils.data.Dataset):
    def __init__(self, num_samples, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(num_samples, 9, generator=generator)
        self.y = (self.x[:, :5] + 0.3 * torch.randn(num_samples, 5, generator=generator)).argmax(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index]}


class Net(nn.Module):
    def __init__(self, rate=0.1):
        super().__init__()
        self.enter = nn.Linear(9, 13)
        self.block1 = nn.Linear(13, 13)
        self.block10 = nn.Linear(13, 13)
        self.norm = nn.LayerNorm(13)
        self.drop = nn.Dropout(rate)
        self.head = nn.Linear(13, 5)

    def forward(self, x):
        x = torch.relu(self.enter(x))
        x = x + torch.tanh(self.block1(x))
        x = x + self.drop(torch.tanh(self.block10(x)))
        return self.head(self.norm(x))


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def logging_loss(model, batch):
    logits = model(batch["x"])
    ml.log("accuracy", (logits.argmax(1) == batch["y"]).float().mean())
    ml.log("largest", logits.detach().abs().max())
    return F.cross_entropy(logits, batch["y"])


def right(model, batch):
    return (model(batch["x"]).argmax(1) == batch["y"]).float().mean()


def two(named):
    body = [p for name, p in named if not name.startswith("head")]
    head = [p for name, p in named if name.startswith("head")]
    groups = [
        {"params": [p for p in body if p.ndim > 1], "weight_decay": 0.2, "lr": 2e-2},
        {"params": [p for p in body if p.ndim <= 1], "weight_decay": 0.0, "lr": 5e-3},
    ]
    return [torch.optim.AdamW(groups), torch.optim.SGD(head, lr=0.1, momentum=0.9)]


def schedules(optimizers):
    return [
        torch.optim.lr_scheduler.LambdaLR(optimizers[0], lambda step: 1 / (1 + 0.2 * step)),
        torch.optim.lr_scheduler.LambdaLR(optimizers[1], lambda step: min(1.0, (step + 1) / 6)),
    ]


job = ml.Job(
    model=Net,
    loss=loss,
    optimizer=two,
    scheduler=schedules,
    data=lambda: Rows(27, 1),
    batch_size=8,
    steps=40,
    clip_grad_norm=0.7,
    evaluate=ml.Evaluate(lambda: Rows(19, 2), {"loss": loss, "right": right}, every=4),
    checkpoint_every=4,
    keep_checkpoints=20,
)
adagrad = replace(
    job,
    optimizer=lambda named: torch.optim.Adagrad(
        [p for _, p in named], lr=0.05, initial_accumulator_value=0.3
    ),
    scheduler=None,
)
adam = replace(job, optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2), scheduler=None)
clipped = replace(
    job,
    clip_grad_norm=0.2,
    optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.3, momentum=0.8),
    scheduler=None,
)
ema = replace(
    adam, average=0.8, evaluate=ml.Evaluate(lambda: Rows(19, 2), {"loss": loss, "right": right}, every=2)
)
logged = replace(job, loss=logging_loss)
best = replace(
    adam,
    evaluate=ml.Evaluate(
        lambda: Rows(19, 2), {"loss": loss, "right": right}, every=2, best="right:max", patience=3
    ),
)
frozen_one = replace(adam, frozen={"block1": range(3)})
adafactor = replace(
    job,
    optimizer=lambda named: torch.optim.Adafactor([p for _, p in named], lr=2e-2, weight_decay=0.3),
    scheduler=None,
    frozen={"block1": range(2)},
)


def by_hand(optimizer):
    def set_rates(step):
        for number, group in enumerate(optimizer.param_groups):
            group["lr"] = 0.02 * (0.7**step) * (number + 1)
            group["weight_decay"] = 0.1 * (step % 3)

    return set_rates


hand = replace(
    adam,
    scheduler=by_hand,
    optimizer=lambda named: torch.optim.AdamW(
        [{"params": [p for _, p in named if p.ndim > 1]}, {"params": [p for _, p in named if p.ndim <= 1]}],
        lr=1e-2,
    ),
)


class ByValue:
    """A rate that follows the metric's value."""

    def __init__(self, optimizer):
        self.optimizer, self.seen = optimizer, 0

    def step(self, value):
        self.seen += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.02 / (1 + value * self.seen)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


by_metric = replace(
    adam,
    scheduler=lambda optimizer: ml.ByMetric(ByValue(optimizer), "loss"),
    evaluate=ml.Evaluate(lambda: Rows(19, 2), {"loss": loss, "right": right}, every=2),
)
lbfgs = replace(
    job,
    optimizer=lambda named: torch.optim.LBFGS([p for _, p in named], lr=0.3, max_iter=3),
    scheduler=None,
    clip_grad_norm=None,
)
lbfgs_frozen = replace(lbfgs, frozen={"block1": range(2)})
