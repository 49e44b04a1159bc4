"""Small transformers on random tokens: tied embeddings, padding, ignored targets, grouped heads."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import meshloom as ml

VOCABULARY, LENGTH, PADDING = 37, 7, 36


def texts(count: int, seed: int, padded: bool = False) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY - 1, (count, LENGTH + 1), generator=generator)
    given, wanted = ids[:, :-1].clone(), ids[:, 1:].clone()
    if padded:
        for row in range(count):
            end = 3 + row % 5
            given[row, end:] = PADDING
            wanted[row, end:] = -100
    return TensorDataset(given, wanted)


class Attend(nn.Module):
    """Each key head serves several query heads."""

    def forward(self, q, k, v):
        repeats = q.shape[1] // k.shape[1]
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, keys: int, rate: float) -> None:
        super().__init__()
        self.size = width // heads
        self.norm1 = nn.LayerNorm(width)
        self.q = nn.Linear(width, heads * self.size)
        self.k = nn.Linear(width, keys * self.size)
        self.v = nn.Linear(width, keys * self.size)
        self.core = Attend()
        self.o = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)
        self.drop = nn.Dropout(rate)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (
            each(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        x = x + self.o(self.core(q, k, v).transpose(1, 2).flatten(2))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, width=18, heads=3, keys=3, rate=0.0, tied=True, padding=None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width, padding_idx=padding)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.blocks = nn.ModuleList(Block(width, heads, keys, rate) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mean_loss(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def token_loss(model, batch):
    logits, wanted = model(batch[0]).flatten(0, 1), batch[1].flatten()
    return F.cross_entropy(logits, wanted, reduction="sum"), (wanted >= 0).sum()


def sgd(named):
    return torch.optim.SGD([each for _, each in named], lr=0.05, momentum=0.9)


def adamw(named):
    return torch.optim.AdamW([each for _, each in named], lr=3e-3)


tied = ml.Job(model=GPT, loss=mean_loss, optimizer=sgd, data=lambda: texts(24, 1), batch_size=8, steps=30)
tokens = ml.Job(
    model=lambda: GPT(rate=0.1),
    loss=token_loss,
    optimizer=adamw,
    data=lambda: texts(26, 2, True),
    batch_size=10,
    steps=30,
    clip_grad_norm=1.0,
)
padded = ml.Job(
    model=lambda: GPT(tied=False, padding=PADDING),
    loss=mean_loss,
    optimizer=adamw,
    data=lambda: texts(26, 3, True),
    batch_size=10,
    steps=30,
)
grouped = ml.Job(
    model=lambda: GPT(width=20, heads=4, keys=2, tied=False),
    loss=mean_loss,
    optimizer=adamw,
    data=lambda: texts(26, 4),
    batch_size=6,
    steps=30,
)
