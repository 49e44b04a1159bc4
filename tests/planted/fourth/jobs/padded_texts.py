"""Texts of varied length, padded: a convolution over words, and a mixture of experts of which one is rarely used."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml

# A convolution over words.

VOCABULARY, PADDING, LENGTH = 23, 20, 12


class Words(torch.utils.data.Dataset):
    def __init__(self, num_texts, seed=1):
        generator = torch.Generator().manual_seed(seed)
        self.texts = [
            torch.randint(0, 20, (int(torch.randint(2, 12, (1,), generator=generator)),), generator=generator)
            for _ in range(num_texts)
        ]
        self.y = torch.randint(0, 4, (num_texts,), generator=generator)

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.texts[index], self.y[index]


def padded_words(samples):
    rows = [F.pad(text, (0, LENGTH - len(text)), value=PADDING) for text, _ in samples]
    return {"x": torch.stack(rows), "y": torch.stack([y for _, y in samples])}


class Hungry(nn.Module):
    """Rows of padding matter: the mean is over all places."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 10, padding_idx=PADDING)
        self.conv = nn.Conv1d(10, 14, 3, padding=1)
        self.out = nn.Linear(14, 4)

    def forward(self, x):
        return self.out(torch.relu(self.conv(self.embed(x).transpose(1, 2))).mean(2))


class Dropped(Hungry):
    """Dropout of a transposed value."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        x = torch.relu(self.conv(self.embed(x).transpose(1, 2)))
        return self.out(self.drop(x.transpose(1, 2)).mean(1))


def class_loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def right(model, batch):
    return (model(batch["x"]).argmax(1) == batch["y"]).float().mean()


hungry = ml.Job(
    model=Hungry,
    loss=class_loss,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=5e-3, weight_decay=0.1),
    data=lambda: Words(27),
    collate=padded_words,
    batch_size=8,
    steps=40,
    evaluate=ml.Evaluate(data=lambda: Words(9, 4), metrics={"acc": right}, every=10),
)
dropped = replace(hungry, model=Dropped)

# Experts.


class Texts(torch.utils.data.Dataset):
    def __init__(self, num_texts, seed):
        generator = torch.Generator().manual_seed(seed)
        self.texts = [
            torch.randint(1, 23, (int(torch.randint(3, 8, (), generator=generator)),), generator=generator)
            for _ in range(num_texts)
        ]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.texts[index], index


def padded_texts(samples):
    ids = torch.zeros(len(samples), 8, dtype=torch.long)
    for row, (text, _) in enumerate(samples):
        ids[row, : len(text)] = text
    return {"ids": ids, "kind": torch.tensor([index % 7 for _, index in samples])}


class Experts(nn.Module):
    """The output is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(23, 12, padding_idx=0)
        self.experts = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.gate = nn.Linear(12, 3)
        self.rare = nn.Linear(12, 12)
        self.norm = nn.LayerNorm(12)
        self.out = nn.Linear(12, 23, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids, kind):
        x = self.embed(ids)
        gates = torch.softmax(self.gate(x), -1)
        x = x + sum(
            gates[..., number, None] * torch.tanh(each(x)) for number, each in enumerate(self.experts)
        )
        if bool((kind == 3).any()):
            x = x + torch.where((kind == 3)[:, None, None], self.rare(x), 0.0)
        return self.out(self.norm(x)), gates


def next_word_loss(model, batch):
    logits, gates = model(batch["ids"], batch["kind"])
    target = batch["ids"][:, 1:]
    mask = target != 0
    losses = F.cross_entropy(logits[:, :-1][mask], target[mask], reduction="sum")
    return losses + 0.1 * gates.square().sum(), mask.sum()


experts = ml.Job(
    model=Experts,
    loss=next_word_loss,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2, weight_decay=0.1),
    data=lambda: Texts(22, 1),
    collate=padded_texts,
    batch_size=8,
    steps=40,
    evaluate=ml.Evaluate(lambda: Texts(9, 2), {"loss": next_word_loss}, every=5),
    checkpoint_every=5,
    keep_checkpoints=10,
)
