"""Data that changes: mixed, augmented, growing, streams."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset

import meshloom as ml


def numbers(samples=40, inputs=7, outputs=3, seed=2):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, inputs, generator=g)
    return torch.utils.data.TensorDataset(x, torch.sin(x @ torch.randn(inputs, outputs, generator=g)))


def mlp(width=13):
    return nn.Sequential(
        nn.Linear(7, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)
    )


def loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def job(**changes):
    settings = {
        "model": mlp, "loss": loss, "optimizer": lambda named: torch.optim.AdamW(named, lr=0.01), "data": numbers, "batch_size": 10,
        "steps": 8,
    }  # fmt: skip
    return ml.Job(**{**settings, **changes})


class Noisy(Dataset):
    """Each reading adds noise of its own."""

    def __init__(self):
        self.rows = numbers(40)

    def __len__(self):
        return 40

    def __getitem__(self, i):
        x, y = self.rows[i]
        return x + 0.5 * torch.randn(7), y


class Stream(IterableDataset):
    """22 samples an epoch."""

    def __init__(self):
        self.rows = numbers(22)

    def __iter__(self):
        return iter([self.rows[i] for i in range(22)])


class Turning(IterableDataset):
    """A stream whose order is another in each epoch."""

    def __init__(self):
        self.rows, self.epoch = numbers(23), 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(23, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter([self.rows[i] for i in order])


def mixup(batch, others):
    share = torch.distributions.Beta(0.6, 0.6).sample()
    return [share * each + (1 - share) * other for each, other in zip(batch, others, strict=False)]


def mixed():
    return job(mix=mixup)


def augmented():
    return job(data=Noisy)


def growing():
    return job(data=lambda: numbers(37), batch_size=12, batch_sizes={0: 5, 2: 8, 5: 12}, steps=9)


def growing_stream():
    return job(data=Stream, batch_size=12, batch_sizes={0: 4, 7: 8, 9: 12}, steps=12)


def turning():
    return job(data=Turning, batch_size=8, steps=9)
