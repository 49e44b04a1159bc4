"""Rhythms: recurrent layers in both directions and a small one, over sequences that are padded to their longest."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Listener(nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        self.notes = nn.Embedding(23, 10)
        self.hear = nn.GRU(10, 12, num_layers=2, batch_first=True, bidirectional=True, dropout=drop)
        self.keep = nn.LSTM(24, 14, batch_first=True)
        self.norm, self.say = nn.LayerNorm(14), nn.Linear(14, 11)

    def forward(self, notes):
        heard, _ = self.hear(self.notes(notes))
        kept, (last, _) = self.keep(torch.tanh(heard))
        return self.say(self.norm(kept.mean(1) + last[-1]))


class Beats(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.notes, self.kind = (
            torch.randint(0, 23, (n, 7), generator=g),
            torch.randint(0, 11, (n,), generator=g),
        )

    def __len__(self):
        return len(self.kind)

    def __getitem__(self, i):
        return self.notes[i], self.kind[i]


WEIGHTS = [0.5 + each / 11 for each in range(11)]


def loss(model, batch):
    weight = torch.tensor(WEIGHTS, dtype=next(model.parameters()).dtype)
    return F.cross_entropy(model(batch[0]), batch[1], weight=weight, label_smoothing=0.1)


def log_loss(model, batch):
    return F.nll_loss(F.log_softmax(model(batch[0]), -1), batch[1])


def right(model, batch):
    return (model(batch[0]).argmax(-1) == batch[1]).float().mean()


job = ml.Job(
    model=Listener,
    loss=loss,
    optimizer=lambda named: torch.optim.RAdam(named, lr=2e-2, weight_decay=0.01),
    data=lambda: Beats(29, 1),
    batch_size=10,
    steps=30,
    drop_last=True,
    evaluate=ml.Evaluate(data=lambda: Beats(13, 2), metrics={"right": right}, every=4, batch_size=5),
)
likelihood = replace(job, loss=log_loss)
dropping = replace(job, model=lambda: Listener(drop=0.3))
