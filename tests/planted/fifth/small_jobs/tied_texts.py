"""Texts of varied lengths, a mean over tokens, and a table that is the head, too, and may be looked up twice or detached."""

from __future__ import annotations

import torch
from torch import nn

import meshloom as ml

V = 23


class Texts(torch.utils.data.Dataset):
    def __init__(self, n=26, s=0):
        g = torch.Generator().manual_seed(s)
        self.t = [torch.randint(1, V, (int(k),), generator=g) for k in torch.randint(3, 9, (n,), generator=g)]

    def __len__(self):
        return len(self.t)

    def __getitem__(self, i):
        return self.t[i]


def pad(items):
    return nn.utils.rnn.pad_sequence([*items, torch.zeros(9, dtype=torch.long)], batch_first=True)[:-1]


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n = nn.LayerNorm(d)
        self.q = nn.Linear(d, d)
        self.k = nn.Linear(d, d)
        self.v = nn.Linear(d, d)
        self.up = nn.Linear(d, 3 * d)
        self.down = nn.Linear(3 * d, d)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        h = self.n(x)
        a = (self.q(h) @ self.k(h).transpose(1, 2) / 3).masked_fill(
            torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), -1e9
        ).softmax(-1) @ self.v(h)
        x = x + self.drop(a)
        return x + self.drop(self.down(torch.relu(self.up(x))))


class LM(nn.Module):
    def __init__(self, tied=True, detach=False, third=False):
        super().__init__()
        d = 11
        self.emb = nn.Embedding(V, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(3))
        self.final = nn.LayerNorm(d)
        self.tied, self.detach, self.third = tied, detach, third
        if not tied:
            self.head = nn.Linear(d, V, bias=False)

    def forward(self, t):
        w = self.emb.weight
        x = nn.functional.embedding(t, w.detach() if self.detach else w)
        for i, b in enumerate(self.blocks):
            x = b(x)
            if self.third and i == 1:
                x = x + nn.functional.embedding(t, w) * 0.5
        x = self.final(x)
        return x @ w.T if self.tied else self.head(x)


def loss(m, b):
    y = b[:, 1:]
    return nn.functional.cross_entropy(
        m(b[:, :-1]).flatten(0, 1), y.flatten(), ignore_index=0, reduction="sum"
    ), (y != 0).sum()


def make(model=LM, **kw):
    a = {
        "model": model,
        "loss": loss,
        "optimizer": lambda named: torch.optim.AdamW([p for n, p in named], lr=1e-2),
        "data": Texts,
        "collate": pad,
        "batch_size": 8,
        "steps": 40,
        "clip_grad_norm": 0.5,
        "evaluate": ml.Evaluate(data=lambda: Texts(9, 1), metrics={"nll": loss}, every=2),
    }
    a.update(kw)
    return ml.Job(**a)


job = make()
untied = make(lambda: LM(False))
detached = make(lambda: LM(True, True))
three = make(lambda: LM(True, False, True))
averaged = make(average=0.6)
