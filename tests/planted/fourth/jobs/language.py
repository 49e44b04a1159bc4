"""A small GPT: grouped heads, tied weights, averages, and losses with smoothing, class weights and ignored targets."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml

VOCABULARY = 23


class Text(torch.utils.data.Dataset):
    def __init__(self, num_texts, seed=1, length=6):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randint(0, VOCABULARY, (num_texts, length + 1), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index, :-1], "y": self.x[index, 1:]}


class Attention(nn.Module):
    def __init__(self, width, heads, groups, rate):
        super().__init__()
        self.heads, self.groups, self.rate, self.size = heads, groups, rate, width // heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, groups * self.size)
        self.v = nn.Linear(width, groups * self.size)
        self.o = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q = self.q(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.k(x).view(batch, length, self.groups, self.size).transpose(1, 2)
        v = self.v(x).view(batch, length, self.groups, self.size).transpose(1, 2)
        rate = self.rate if self.training else 0.0
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=rate, is_causal=True, enable_gqa=self.groups != self.heads
        )
        return self.o(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width, heads, groups, rate):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, groups, rate)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        self.drop = nn.Dropout(rate)

    def forward(self, x):
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """mid: the tied weight is used in the middle as well."""

    def __init__(self, heads=6, groups=3, rate=0.1, tied=True, mid=False, width=18):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.embed.weight, std=0.25)
        self.pos = nn.Parameter(torch.randn(6, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads, groups, rate) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=not tied)
        self.mid = mid
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        hidden = self.embed(x) + self.pos[: x.shape[1]]
        for number, block in enumerate(self.blocks):
            hidden = block(hidden)
            if self.mid and number == 1:
                shares = torch.softmax(hidden @ self.embed.weight.T, -1)
                hidden = hidden + 0.3 * shares @ self.embed.weight
        return self.head(self.norm(hidden))


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def smoothed_loss(model, batch):
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), label_smoothing=0.15)


CLASS_WEIGHTS = (torch.arange(VOCABULARY) % 4 + 1.0) / 2.5


def weighted_loss(model, batch):
    weight = CLASS_WEIGHTS.to(batch["x"].device)
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), weight=weight)


def skipping_loss(model, batch):
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), ignore_index=4)


def groups(named):
    named = list(named)
    matrices = [(name, p) for name, p in named if p.ndim > 1]
    others = [(name, p) for name, p in named if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=3e-3
    )


def sgd(named):
    return torch.optim.SGD([p for _, p in named], lr=0.3, momentum=0.5)


job = ml.Job(
    model=GPT,
    loss=loss,
    optimizer=groups,
    scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.3, 1.0, 10),
    data=lambda: Text(21),
    batch_size=6,
    steps=40,
    evaluate=ml.Evaluate(data=lambda: Text(8, 5), metrics={"nll": loss}, every=10),
)
mid = replace(job, model=lambda: GPT(mid=True))
untied = replace(job, model=lambda: GPT(tied=False), clip_grad_norm=0.5)
smoothed = replace(job, model=lambda: GPT(tied=False), loss=smoothed_loss)
weighted = replace(job, model=lambda: GPT(tied=False), loss=weighted_loss)
skipping = replace(job, model=lambda: GPT(tied=False), loss=skipping_loss)
two_groups = replace(job, model=lambda: GPT(groups=2, rate=0.0, tied=False), optimizer=sgd)
averaged = replace(job, average=0.9)
