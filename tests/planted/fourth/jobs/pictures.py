"""A small convolutional net: augmentation, worker processes, mixing, batch norm (cumulative, with momentum, in evaluation mode), a part
that is made outside of the job."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Pictures(torch.utils.data.Dataset):
    def __init__(self, num_samples, seed, augment=True):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(num_samples, 3, 7, 7, generator=generator)
        self.y = torch.randint(4, (num_samples,), generator=generator)
        self.augment, self.epoch = augment, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        if self.augment:
            x = x.flip(2) if random.random() < 0.5 else x
            x = x + 0.1 * torch.randn(3, 7, 7) + 0.02 * self.epoch
        return {"x": x, "y": self.y[index]}


class Net(nn.Module):
    def __init__(self, momentum=0.1):
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3, padding=1)
        self.bn = nn.BatchNorm2d(5, momentum=momentum)
        self.drop = nn.Dropout(0.2)
        self.second = nn.Conv2d(5, 6, 3, stride=2)
        self.bn2 = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = self.drop(torch.relu(self.bn(self.first(x))))
        x = torch.relu(self.bn2(self.second(x)))
        return self.head(x.mean((2, 3)))


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def right(model, batch):
    return (model(batch["x"]).argmax(1) == batch["y"]).float().mean()


job = ml.Job(
    model=Net,
    loss=loss,
    optimizer=lambda named: torch.optim.SGD(
        [p for _, p in named], lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2
    ),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=60),
    data=lambda: Pictures(21, 1),
    batch_size=9,
    steps=40,
    evaluate=ml.Evaluate(lambda: Pictures(13, 2, False), {"loss": loss, "right": right}, every=5),
    checkpoint_every=4,
    keep_checkpoints=20,
)
cumulative = replace(job, model=lambda: Net(None))
workers = replace(job, num_workers=2)


def fixed():
    model = Net()
    model.train()
    model.bn2.eval()
    return model


still = replace(job, model=fixed)


def cut(batch, others):
    share = torch.rand(())
    return {
        "x": share * batch["x"] + (1 - share) * others["x"],
        "y": batch["y"],
        "other": others["y"],
        "share": share * torch.ones(len(batch["y"])),
    }


def mixed_loss(model, batch):
    logits = model(batch["x"])
    own, other = (F.cross_entropy(logits, batch[name], reduction="none") for name in ("y", "other"))
    return (batch["share"] * own + (1 - batch["share"]) * other).mean()


mixed = replace(job, loss=mixed_loss, mix=cut)
# A part of the model is made outside of the job, with a hook.

BACKBONE = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 6, 3))
BACKBONE[2].weight.register_hook(lambda gradient: gradient * 0.25)


class OnTop(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = BACKBONE
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.backbone(x).mean((2, 3)))


outside = replace(job, model=OnTop)
