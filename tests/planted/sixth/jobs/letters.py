"""Letters of words, one after another: a small decoder with tied tables, grouped heads and gated layers."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml

PAD, LETTERS, WIDTH = 0, 31, 24


class Layer(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 16, bias=False)
        self.out, self.drop = nn.Linear(24, WIDTH), nn.Dropout(drop)
        self.gate, self.up = nn.Linear(WIDTH, 38), nn.Linear(WIDTH, 38)
        self.down = nn.Linear(38, WIDTH)

    def forward(self, x):
        n, length, _ = x.shape
        h = self.before(x)
        q = self.q(h).view(n, length, 6, 4).transpose(1, 2)
        k, v = self.kv(h).view(n, length, 2, 2, 4).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.drop(self.out(h.transpose(1, 2).reshape(n, length, 24)))
        h = self.between(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Speller(nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH, padding_idx=PAD)
        self.places = nn.Parameter(torch.randn(9, WIDTH) * 0.1)
        self.layers = nn.ModuleList(Layer(drop) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, LETTERS, bias=False)
        self.head.weight = self.letters.weight

    def forward(self, ids):
        x = self.letters(ids) + self.places[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Words(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(1, LETTERS, (n, 10), generator=g)
        for row, length in zip(self.ids, torch.randint(3, 11, (n,), generator=g), strict=True):
            row[length:] = PAD

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"ids": self.ids[i]}


def loss(model, batch):
    ids = batch["ids"]
    logits, target = model(ids[:, :-1]), ids[:, 1:]
    total = F.cross_entropy(
        logits.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum", label_smoothing=0.05
    )
    ml.log("longest", (ids != PAD).sum(1).max().float())
    return total, (target != PAD).sum()


def bits(model, batch):
    ids = batch["ids"]
    total = F.cross_entropy(
        model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), ignore_index=PAD, reduction="sum"
    )
    return total / 0.6931, (ids[:, 1:] != PAD).sum()


def optimizer(named):
    return torch.optim.AdamW(
        [
            {"params": [(name, each) for name, each in named if each.ndim > 1], "weight_decay": 0.1},
            {
                "params": [(name, each) for name, each in named if each.ndim < 2],
                "weight_decay": 0.0,
                "lr": 2e-3,
            },
        ],
        lr=5e-3,
    )


job = ml.Job(
    model=Speller,
    loss=loss,
    optimizer=optimizer,
    data=lambda: Words(41, 3),
    batch_size=12,
    steps=30,
    seed=5,
    clip_grad_norm=0.7,
    scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 5)),
    evaluate=ml.Evaluate(data=lambda: Words(17, 4), metrics={"bits": bits}, every=3),
)
averaged = replace(job, average=0.8, model=lambda: Speller(drop=0.2), clip_grad_norm=None)
dropping = replace(job, model=lambda: Speller(drop=0.2))
