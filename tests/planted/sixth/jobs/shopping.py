"""Shopping: sparse tables, bags with a limit, a rate that goes by an evaluation, several optimizers."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Basket(nn.Module):
    def __init__(self, sparse=True):
        super().__init__()
        self.people = nn.Embedding(37, 8, sparse=sparse)
        self.goods = nn.EmbeddingBag(43, 8, mode="mean", max_norm=None if sparse else 1.5)
        self.one, self.two = nn.Linear(16, 21), nn.Linear(21, 1)
        self.norm = nn.LayerNorm(21)

    def forward(self, person, goods):
        x = torch.cat([self.people(person), self.goods(goods)], 1)
        return self.two(self.norm(F.elu(self.one(x)))).squeeze(1)


class Sales(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.person, self.goods = (
            torch.randint(0, 37, (n,), generator=g),
            torch.randint(0, 43, (n, 4), generator=g),
        )
        self.paid = torch.rand(n, generator=g) * 3

    def __len__(self):
        return len(self.paid)

    def __getitem__(self, i):
        return self.person[i], self.goods[i], self.paid[i]


def loss(model, batch):
    return F.mse_loss(model(batch[0], batch[1]), batch[2])


def optimizers(named):
    return [
        torch.optim.SparseAdam([each for each in named if each[0].startswith("people")], lr=2e-2),
        torch.optim.AdamW([each for each in named if not each[0].startswith("people")], lr=1e-2),
    ]


job = ml.Job(
    model=Basket,
    loss=loss,
    optimizer=optimizers,
    data=lambda: Sales(45, 1),
    batch_size=13,
    steps=30,
    scheduler=lambda both: [
        torch.optim.lr_scheduler.ExponentialLR(both[0], 0.9),
        ml.ByMetric(
            torch.optim.lr_scheduler.ReduceLROnPlateau(both[1], patience=0, factor=0.3, threshold=0.6), "mse"
        ),
    ],
    evaluate=ml.Evaluate(data=lambda: Sales(15, 2), metrics={"mse": loss}, every=2),
)
dense = replace(
    job,
    model=lambda: Basket(sparse=False),
    optimizer=lambda named: torch.optim.Adagrad(named, lr=0.05),
    scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5, threshold=0.3),
)
