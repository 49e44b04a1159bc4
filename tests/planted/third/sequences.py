"""Models of sequences for the third list: a small GPT, an LSTM, an encoder with a decoder."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Rows(torch.utils.data.Dataset):
    def __init__(self, n, make, draws=None):
        g = torch.Generator().manual_seed(n * 7 + 1)
        self.items = [make(g, i) for i in range(n)]
        self.draws = draws

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        item = self.items[i]
        return self.draws(item) if self.draws else item


# GPT.


class Attention(nn.Module):
    def __init__(self, d, heads, kv=None, p=0.1):
        super().__init__()
        self.heads, self.kv, self.size = heads, kv or heads, d // heads
        self.q = nn.Linear(d, d)
        self.k = nn.Linear(d, self.kv * self.size)
        self.v = nn.Linear(d, self.kv * self.size)
        self.out = nn.Linear(d, d)
        self.drop = nn.Dropout(p)

    def forward(self, x, memory=None, causal=True):
        b, t, d = x.shape
        m = x if memory is None else memory
        s = m.shape[1]
        q = self.q(x).view(b, t, self.heads, self.size).transpose(1, 2)
        k = self.k(m).view(b, s, self.kv, self.size).transpose(1, 2)
        v = self.v(m).view(b, s, self.kv, self.size).transpose(1, 2)
        if self.kv != self.heads:
            k = k.repeat_interleave(self.heads // self.kv, 1)
            v = v.repeat_interleave(self.heads // self.kv, 1)
        w = q @ k.transpose(-1, -2) / math.sqrt(self.size)
        if causal and memory is None:
            w = w.masked_fill(torch.ones(t, s, dtype=torch.bool, device=x.device).triu(1), -1e9)
        y = (self.drop(w.softmax(-1)) @ v).transpose(1, 2).reshape(b, t, d)
        return self.out(y)


class PackedAttention(nn.Module):
    def __init__(self, d, heads, p=0.1):
        super().__init__()
        self.heads, self.size = heads, d // heads
        self.qkv, self.out, self.drop = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Dropout(p)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (
            each.view(b, t, self.heads, self.size).transpose(1, 2) for each in self.qkv(x).split(d, -1)
        )
        w = q @ k.transpose(-1, -2) / math.sqrt(self.size)
        w = w.masked_fill(torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1), -1e9)
        return self.out((self.drop(w.softmax(-1)) @ v).transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, d, heads, hidden, p, kv=None, packed=False):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention = PackedAttention(d, heads, p) if packed else Attention(d, heads, kv, p)
        self.up, self.down, self.drop = nn.Linear(d, hidden), nn.Linear(hidden, d), nn.Dropout(p)

    def forward(self, x):
        x = x + self.attention(self.n1(x))
        return x + self.drop(self.down(F.gelu(self.up(self.n2(x)))))


class GPT(nn.Module):
    def __init__(self, vocab=37, d=18, heads=3, hidden=31, layers=2, t=7, p=0.1, kv=None, packed=False):
        super().__init__()
        self.embed, self.place = nn.Embedding(vocab, d), nn.Embedding(t, d)
        self.drop = nn.Dropout(p)
        self.blocks = nn.ModuleList([Block(d, heads, hidden, p, kv, packed) for _ in range(layers)])
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.2)

    def forward(self, x):
        y = self.drop(self.embed(x) + self.place(torch.arange(x.shape[1], device=x.device)))
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y))


def text(g, i):
    x = torch.randint(0, 37, (8,), generator=g)
    y = x[1:].clone()
    y[7 - int(torch.randint(0, 4, (), generator=g)) :] = -100
    return {"x": x[:-1], "y": y}


def text_loss(model, batch):
    total = F.cross_entropy(
        model(batch["x"]).flatten(0, 1), batch["y"].flatten(), ignore_index=-100, reduction="sum"
    )
    return total, (batch["y"] != -100).sum()


def text_right(model, batch):
    return (model(batch["x"]).argmax(-1) == batch["y"]).sum(), (batch["y"] != -100).sum()


def two_groups(named):
    decay = [p for _, p in named if p.ndim > 1]
    rest = [p for _, p in named if p.ndim <= 1]
    return torch.optim.AdamW(
        [
            {"params": decay, "weight_decay": 0.1, "lr": 4e-3},
            {"params": rest, "weight_decay": 0.0, "lr": 1e-3},
        ],
        betas=(0.8, 0.9),
    )


def warm(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda s: (s + 1) / (s + 3), lambda s: 1 / (s + 1)])


def gpt(**kwargs):
    return ml.Job(
        model=lambda: GPT(**kwargs),
        loss=text_loss,
        optimizer=two_groups,
        scheduler=warm,
        clip_grad_norm=0.4,
        data=lambda: Rows(29, text),
        batch_size=12,
        steps=12,
        seed=5,
        evaluate=ml.Evaluate(
            data=lambda: Rows(17, text),
            metrics={"loss": text_loss, "right": text_right},
            every=2,
            batch_size=7,
        ),
    )


def mqa():
    return gpt(kv=1, heads=2, d=14)


# LSTM with padding.


class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(23, 9)
        self.rnn = nn.LSTM(9, 11, 2, batch_first=True, dropout=0.2)
        self.drop, self.out = nn.Dropout(0.1), nn.Linear(11, 23)

    def forward(self, x):
        return self.out(self.drop(self.rnn(self.embed(x))[0]))


def sequence(g, i):
    x = torch.randint(0, 23, (7,), generator=g)
    mask = torch.arange(6) < 3 + int(torch.randint(0, 4, (), generator=g))
    return {"x": x[:-1], "y": x[1:], "mask": mask.float()}


def masked_loss(model, batch):
    each = F.cross_entropy(model(batch["x"]).transpose(1, 2), batch["y"], reduction="none")
    return (each * batch["mask"]).sum(), batch["mask"].sum()


def lstm():
    return ml.Job(
        model=LSTM,
        loss=masked_loss,
        optimizer=lambda named: torch.optim.Adam([p for _, p in named], lr=0.01),
        data=lambda: Rows(25, sequence),
        batch_size=10,
        steps=10,
        seed=2,
        clip_grad_norm=0.5,
        evaluate=ml.Evaluate(data=lambda: Rows(11, sequence), metrics={"loss": masked_loss}, every=2),
    )


# encoder-decoder.


class Layer(nn.Module):
    def __init__(self, d, cross):
        super().__init__()
        self.n1, self.own = nn.LayerNorm(d), Attention(d, 2, p=0.1)
        self.cross = Attention(d, 2, p=0.1) if cross else None
        self.n2 = nn.LayerNorm(d) if cross else None
        self.n3, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 21), nn.Linear(21, d)

    def forward(self, x, memory=None):
        x = x + self.own(self.n1(x), causal=self.cross is not None)
        if self.cross is not None:
            x = x + self.cross(self.n2(x), memory)
        return x + self.down(F.relu(self.up(self.n3(x))))


class EncDec(nn.Module):
    def __init__(self, d=10):
        super().__init__()
        self.embed = nn.Embedding(19, d)
        self.encoder = nn.ModuleList([Layer(d, False) for _ in range(2)])
        self.decoder = nn.ModuleList([Layer(d, True) for _ in range(3)])
        self.out = nn.Linear(d, 19)

    def forward(self, s, t):
        memory, y = self.embed(s), self.embed(t)
        for each in self.encoder:
            memory = each(memory)
        for each in self.decoder:
            y = each(y, memory)
        return self.out(y)


def pair(g, i):
    s = torch.randint(0, 19, (5,), generator=g)
    t = torch.cat([s.flip(0), torch.randint(0, 19, (2,), generator=g)])
    return {"s": s, "t": t[:-1], "y": t[1:]}


def pair_loss(model, batch):
    return F.cross_entropy(model(batch["s"], batch["t"]).flatten(0, 1), batch["y"].flatten())


def encdec():
    return ml.Job(
        model=EncDec,
        loss=pair_loss,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=5e-3),
        data=lambda: Rows(27, pair),
        batch_size=12,
        steps=10,
        seed=4,
        clip_grad_norm=1.0,
        evaluate=ml.Evaluate(data=lambda: Rows(10, pair), metrics={"loss": pair_loss}, every=2),
        scheduler=lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.3, 1.0, 5),
    )
