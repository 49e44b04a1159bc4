"""Residual blocks on rows of numbers: parameter groups, a loss of sums, a branch that few batches take, frozen weights, Python's draws."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Rows(torch.utils.data.Dataset):
    """Those in `flags` make their batch take the branch."""

    def __init__(self, num_rows, seed=3, flags=(0,)):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(num_rows, 7, generator=generator)
        self.y = torch.randint(0, 5, (num_rows,), generator=generator)
        self.w = torch.rand(num_rows, generator=generator) + 0.3
        self.flag = torch.zeros(num_rows, dtype=torch.bool)
        self.flag[list(flags)] = True

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index], "w": self.w[index], "flag": self.flag[index]}


class Block(nn.Module):
    def __init__(self, width, hidden, rate):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.drop = nn.Dropout(rate)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, branch=False, rate=0.1, depth=3):
        super().__init__()
        self.inp = nn.Linear(7, 9)
        self.blocks = nn.ModuleList(Block(9, 13, rate) for _ in range(depth))
        self.branch = nn.Linear(9, 9) if branch else None
        self.out = nn.Linear(9, 5)

    def forward(self, x, flag=None):
        x = self.inp(x)
        if self.branch is not None and bool(flag.any()):
            x = x + torch.tanh(self.branch(x))
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def class_loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def weighted_loss(model, batch):
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (losses * batch["w"]).sum(), batch["w"].sum()


def branching_loss(model, batch):
    return F.cross_entropy(model(batch["x"], batch["flag"]), batch["y"])


def scaled_loss(model, batch):
    return F.cross_entropy(model(batch["x"] * random.uniform(0.3, 1.7)), batch["y"])


def right(model, batch):
    return (model(batch["x"]).argmax(1) == batch["y"]).float().mean()


def branching_right(model, batch):
    return (model(batch["x"], batch["flag"]).argmax(1) == batch["y"]).float().mean()


def groups(named):
    named = [(name, p) for name, p in named if p.requires_grad]
    matrices = [(name, p) for name, p in named if p.ndim > 1]
    others = [(name, p) for name, p in named if p.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0, "lr": 4e-3},
        ],
        lr=7e-3,
    )


def sgd(named):
    return torch.optim.SGD([p for _, p in named if p.requires_grad], lr=0.1, momentum=0.8, weight_decay=0.02)


def frozen_weights():
    model = Net(rate=0.0)
    for name, p in model.named_parameters():
        if name.endswith("weight") and name != "out.weight":
            p.requires_grad_(False)
    return model


def evaluate(metric):
    return ml.Evaluate(data=lambda: Rows(10, 8), metrics={"acc": metric}, every=10)


base = ml.Job(
    model=Net,
    loss=class_loss,
    optimizer=groups,
    scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40),
    data=lambda: Rows(21),
    batch_size=6,
    steps=40,
    evaluate=evaluate(right),
)
job = replace(base, clip_grad_norm=0.4)
sums = replace(base, loss=weighted_loss, optimizer=sgd)
branch = replace(
    base,
    model=lambda: Net(branch=True),
    loss=branching_loss,
    shuffle=False,
    evaluate=evaluate(branching_right),
)
branch_twice = replace(branch, data=lambda: Rows(21, flags=(0, 10, 11, 12)))
biases = replace(base, model=frozen_weights)
scaled = replace(base, loss=scaled_loss)
even = replace(base, model=lambda: Net(rate=0.0), optimizer=sgd, data=lambda: Rows(18))
