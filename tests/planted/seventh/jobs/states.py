"""What forwards keep or draw besides parameters: a moving centre, a count of calls, numbers of numpy, texts in a batch."""

from __future__ import annotations

import numpy
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset, default_collate

import meshloom as ml


def rows(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(count, 10, generator=generator) + 1.0, torch.randint(3, (count,), generator=generator)
    )


class Centre(nn.Module):
    """Takes off a moving average of what it has seen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(width))

    def forward(self, x):
        found = torch.tanh(x - self.shift)
        if self.training:
            with torch.no_grad():
                self.shift.mul_(0.7).add_(0.3 * x.mean(0))
        return found


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(10, 15)
        self.enc = nn.Linear(15, 61)
        self.centre = Centre(61)
        self.out = nn.Linear(61, 3)

    def forward(self, x):
        return self.out(self.centre(self.enc(torch.tanh(self.inp(x)))))


class Jitter(nn.Module):
    """All of a chunk by one number that numpy draws."""

    def forward(self, x):
        return x * (1.0 + torch.tensor(numpy.random.rand()))


class Jittered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(10, 15)
        self.jitter = Jitter()
        self.mid = nn.Linear(15, 11)
        self.out = nn.Linear(11, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.mid(torch.tanh(self.jitter(self.inp(x))))))


class Warm(nn.Module):
    """A factor that grows with each step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x):
        found = x * (1.0 + 0.25 * self.calls)
        if self.training:
            self.calls += 1
        return found


class Warming(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(10, 15)
        self.warm = Warm()
        self.out = nn.Linear(15, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.warm(self.inp(x))))


class Named(Dataset):
    """Rows with a text and a number each."""

    def __init__(self) -> None:
        self.rows = rows(40, 4)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index):
        x, y = self.rows[index]
        return {"x": x, "y": y, "name": f"sample {index}", "weight": 1.0 + index % 3}


def collate(samples):
    found = default_collate([{"x": each["x"], "y": each["y"]} for each in samples])
    return {
        **found,
        "names": [each["name"] for each in samples],
        "weights": [each["weight"] for each in samples],
    }


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def named_loss(model, batch):
    weights = torch.tensor(batch["weights"]) * torch.tensor(
        [2.0 if each.endswith("7") else 1.0 for each in batch["names"]]
    )
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (losses * weights).sum(), weights.sum()


def adam(named):
    return torch.optim.Adam([each for _, each in named], lr=1e-2)


common = {"optimizer": adam, "steps": 30}
centred = ml.Job(model=Centred, loss=loss, data=lambda: rows(48, 1), batch_size=12, **common)
jittered = ml.Job(model=Jittered, loss=loss, data=lambda: rows(48, 2), batch_size=12, **common)
warming = ml.Job(model=Warming, loss=named_loss, data=Named, batch_size=10, collate=collate, **common)
