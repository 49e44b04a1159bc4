"""Data that changes from epoch to epoch, is mixed, or comes as a stream in batches that grow."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset

import meshloom as ml


class Samples(Dataset):
    """Noisy rows; each epoch moves them."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(count, 8, generator=generator)
        self.y = torch.randint(4, (count,), generator=generator)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index] + 0.5 * self.epoch + 0.1 * torch.randn(8), "y": self.y[index]}


class Stream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(4)
        for number in range(14):
            yield {"x": torch.randn(8, generator=generator), "y": torch.tensor(number % 4)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 15)
        self.mid = nn.Linear(15, 11)
        self.out = nn.Linear(11, 4)

    def forward(self, x):
        return self.out(torch.tanh(self.mid(torch.relu(self.inp(x)))))


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def mixup(batch, others):
    share = torch.rand(())
    return {
        "x": share * batch["x"] + (1 - share) * others["x"],
        "y": batch["y"],
        "other": others["y"],
        "share": share.expand(len(batch["y"])),
    }


def mixed_loss(model, batch):
    logits = model(batch["x"])
    own, other = (F.cross_entropy(logits, batch[name], reduction="none") for name in ("y", "other"))
    return (batch["share"] * own + (1 - batch["share"]) * other).mean()


def adam(named):
    return torch.optim.Adam([each for _, each in named], lr=1e-2)


common = {"model": Net, "optimizer": adam, "steps": 30}
epochs = ml.Job(loss=loss, data=lambda: Samples(17), batch_size=12, **common)
mixed = ml.Job(loss=mixed_loss, data=lambda: Samples(30), batch_size=10, mix=mixup, **common)
stream = ml.Job(loss=loss, data=Stream, batch_size=12, batch_sizes={0: 8, 2: 12}, **common)
