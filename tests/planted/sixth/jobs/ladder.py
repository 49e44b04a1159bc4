"""A ladder: an encoder and a decoder with skips between their halves, a table at both ends, and cross attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Rung(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(20), nn.MultiheadAttention(20, 4, batch_first=True, dropout=drop)
        self.wide, self.thin = nn.Linear(20, 33), nn.Linear(33, 20)

    def forward(self, x, memory=None):
        h = self.norm(x)
        x = (
            x
            + self.mix(
                h, h if memory is None else memory, h if memory is None else memory, need_weights=False
            )[0]
        )
        return x + self.thin(F.relu(self.wide(x)))


class Ladder(nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        self.table = nn.Embedding(19, 20)
        self.up = nn.ModuleList(Rung(drop) for _ in range(2))
        self.down = nn.ModuleList(Rung(drop) for _ in range(2))
        self.join = nn.Linear(40, 20)
        self.scale = nn.Parameter(torch.ones(20))

    def forward(self, ids):
        x = self.table(ids)
        first = self.up[0](x)
        second = self.up[1](first * self.scale)
        y = self.down[0](x, second)
        y = self.join(torch.cat([self.down[1](y, first), second], -1))
        return F.linear(y * self.scale, self.table.weight)


class Chains(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        self.ids = torch.randint(0, 19, (n, 6), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i]


def loss(model, batch):
    return F.cross_entropy(model(batch).transpose(1, 2), batch.roll(1, 1))


job = ml.Job(
    model=Ladder,
    loss=loss,
    optimizer=lambda named: torch.optim.AdamW(named, lr=4e-3, amsgrad=True),
    data=lambda: Chains(44, 2),
    batch_size=13,
    steps=30,
    clip_grad_norm=1.0,
    scheduler=lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 30, 2.0),
    evaluate=ml.Evaluate(data=lambda: Chains(10, 3), metrics={"ce": loss}, every=4),
)
dropping = replace(job, model=lambda: Ladder(drop=0.2))
