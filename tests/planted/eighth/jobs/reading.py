"""Data that draws as it is read: map-style with augmentation, a stream, evaluation data that follows epochs."""

import random

import numpy
import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Shaken(torch.utils.data.Dataset):
    def __init__(self, n=33, seed=1):
        self.x = torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        scale = 1 + 0.5 * random.random() + 0.2 * self.epoch
        return {"x": self.x[i] * scale, "y": self.x[i].sum() + 0.1 * float(numpy.random.rand())}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        for i in range(31):
            x = torch.randn(6) + 0.1 * i
            yield {"x": x, "y": x.sum()}


def model():
    return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 1))


def loss(model, batch):
    return F.mse_loss(model(batch["x"])[:, 0], batch["y"])


common = {
    "model": model,
    "loss": loss,
    "optimizer": lambda named: torch.optim.Adam([p for _, p in named], lr=1e-2),
    "batch_size": 8,
    "steps": 9,
}
job = ml.Job(data=Shaken, evaluate=ml.Evaluate(lambda: Shaken(21, 2), {"loss": loss}, every=3), **common)
stream = ml.Job(data=Stream, drop_last=True, **common)
