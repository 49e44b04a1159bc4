"""Recommenders: tables with sparse gradients, with one optimizer or one of their own beside a dense one."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml

# Tables of users and of bags of items.


class Rows(torch.utils.data.Dataset):
    def __init__(self, num_rows, seed=1):
        generator = torch.Generator().manual_seed(seed)
        self.u = torch.randint(0, 31, (num_rows,), generator=generator)
        self.i = torch.randint(0, 29, (num_rows, 4), generator=generator)
        self.y = torch.rand(num_rows, generator=generator)

    def __len__(self):
        return len(self.u)

    def __getitem__(self, index):
        return {"u": self.u[index], "i": self.i[index], "y": self.y[index]}


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(31, 5, sparse=True)
        self.items = nn.EmbeddingBag(29, 5, mode="mean", sparse=True)
        self.mix = nn.Linear(10, 7)
        self.out = nn.Linear(7, 1)

    def forward(self, batch):
        x = torch.cat([self.user(batch["u"]), self.items(batch["i"])], 1)
        return self.out(torch.relu(self.mix(x)))[:, 0]


def bags_loss(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch), batch["y"])


def bags_error(model, batch):
    return (torch.sigmoid(model(batch)) - batch["y"]).abs().mean()


def sparse_and_dense(named):
    tables = [p for name, p in named if name.startswith(("user", "items"))]
    others = [p for name, p in named if not name.startswith(("user", "items"))]
    return [torch.optim.SparseAdam(tables, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


plain = ml.Job(
    model=Bags,
    loss=bags_loss,
    optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.5),
    data=lambda: Rows(27),
    batch_size=8,
    steps=40,
    evaluate=ml.Evaluate(data=lambda: Rows(9, 4), metrics={"mae": bags_error}, every=10),
)
adam = replace(
    plain,
    optimizer=sparse_and_dense,
    scheduler=lambda optimizers: [torch.optim.lr_scheduler.StepLR(each, 5, 0.9) for each in optimizers],
)

# A table of people, of whom each batch has few.


class Clicks(torch.utils.data.Dataset):
    def __init__(self, num_clicks, seed):
        generator = torch.Generator().manual_seed(seed)
        self.users = torch.randint(0, 90, (num_clicks, 2), generator=generator)
        self.users[[index for index in (0, 3, 7) if index < num_clicks], 0] = 0
        self.y = torch.rand(num_clicks, generator=generator).round()

    def __len__(self):
        return len(self.users)

    def __getitem__(self, index):
        return self.users[index], self.y[index]


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.people = nn.Embedding(90, 6, sparse=True)
        self.top = nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 1))

    def forward(self, users):
        return self.top(self.people(users).flatten(1))[:, 0]


def clicks_loss(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


def people_and_top(named):
    return [
        torch.optim.SparseAdam([p for name, p in named if name.startswith("people")], lr=3e-2),
        torch.optim.AdamW([p for name, p in named if not name.startswith("people")], lr=1e-2),
    ]


clicks = ml.Job(
    model=Recommender,
    loss=clicks_loss,
    optimizer=people_and_top,
    data=lambda: Clicks(19, 1),
    batch_size=5,
    steps=40,
    evaluate=ml.Evaluate(lambda: Clicks(7, 2), {"loss": clicks_loss}, every=5),
    checkpoint_every=5,
    keep_checkpoints=10,
)
