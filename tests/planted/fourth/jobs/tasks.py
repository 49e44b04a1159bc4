"""Batches with a text that says which task they are of, which chooses a part of the model."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Rows(torch.utils.data.Dataset):
    def __init__(self, num_rows, seed=3):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(num_rows, 7, generator=generator)
        self.y = torch.randint(0, 5, (num_rows,), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index], index


def collate(samples):
    first = samples[0][2]
    return {
        "x": torch.stack([x for x, _, _ in samples]),
        "y": torch.stack([y for _, y, _ in samples]),
        "temperature": 1.0 + first % 3,
        "task": "copy" if (first // 6) % 2 == 0 else "swap",
    }


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(7, 12)
        self.copy = nn.Linear(12, 12)
        self.swap = nn.Linear(12, 12)
        self.out = nn.Linear(12, 5)

    def forward(self, x, task):
        hidden = torch.relu(self.inp(x))
        hidden = hidden + torch.tanh((self.copy if task == "copy" else self.swap)(hidden))
        return self.out(hidden)


def loss(model, batch):
    return F.cross_entropy(model(batch["x"], batch["task"]) / batch["temperature"], batch["y"])


def right(model, batch):
    return (model(batch["x"], batch["task"]).argmax(1) == batch["y"]).float().mean()


job = ml.Job(
    model=Net,
    loss=loss,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=5e-3),
    data=lambda: Rows(21),
    collate=collate,
    shuffle=False,
    batch_size=6,
    steps=40,
    evaluate=ml.Evaluate(data=lambda: Rows(12, 5), metrics={"acc": right}, every=10),
)
