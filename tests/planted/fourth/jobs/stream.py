"""A stream of varied lengths with draws of its own, mixed, in batches that grow."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy
import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, num_samples=17):
        self.num_samples, self.epoch = num_samples, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(5)
        for _ in range(self.num_samples):
            length = int(torch.randint(3, 8, (), generator=generator))
            x = torch.randn(length, 6, generator=generator)
            y = x[:, :4].sum(0).argmax()
            noise = 0.2 * torch.randn(length, 6)
            shift = 0.05 * random.random()
            yield x + noise + shift + 0.05 * float(numpy.random.rand()), y


def padded(samples):
    longest = 8
    x = torch.zeros(len(samples), longest, 6)
    mask = torch.zeros(len(samples), longest)
    for row, (each, _) in enumerate(samples):
        x[row, : len(each)] = each
        mask[row, : len(each)] = 1
    return {"x": x, "mask": mask, "y": torch.stack([y for _, y in samples])}


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, 10)
        self.rnn = nn.GRU(10, 12, batch_first=True)
        self.head = nn.Linear(12, 4)

    def forward(self, x, mask):
        out, _ = self.rnn(torch.tanh(self.enter(x)))
        return self.head((out * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True))


def loss(model, batch):
    return F.cross_entropy(model(batch["x"], batch["mask"]), batch["y"], reduction="sum"), len(batch["y"])


class Held(torch.utils.data.Dataset):
    def __init__(self):
        self.all = list(Stream(11))

    def __len__(self):
        return len(self.all)

    def __getitem__(self, index):
        return self.all[index]


job = ml.Job(
    model=Reader,
    loss=loss,
    optimizer=lambda named: torch.optim.RMSprop([p for _, p in named], lr=3e-3, momentum=0.5),
    data=Stream,
    collate=padded,
    batch_size=6,
    steps=40,
    evaluate=ml.Evaluate(Held, {"loss": loss}, every=5),
    checkpoint_every=2,
    keep_checkpoints=30,
)
growing = replace(job, batch_sizes={0: 3, 1: 6})


def mixup(batch, others):
    share = torch.rand(())
    x = share * batch["x"] + (1 - share) * others["x"]
    mask = torch.maximum(batch["mask"], others["mask"])
    return {"x": x, "mask": mask, "y": batch["y"], "other": others["y"], "share": share * torch.ones(len(x))}


def mixed_loss(model, batch):
    logits = model(batch["x"], batch["mask"])
    if "share" not in batch:
        return F.cross_entropy(logits, batch["y"])
    own, other = (F.cross_entropy(logits, batch[name], reduction="none") for name in ("y", "other"))
    return (batch["share"] * own + (1 - batch["share"]) * other).mean()


mixed = replace(job, loss=mixed_loss, mix=mixup, evaluate=ml.Evaluate(Held, {"loss": loss}, every=5))
