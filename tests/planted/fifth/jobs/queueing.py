"""A student's outputs against a queue of earlier ones, in a buffer with its pointer; bags of ids; a norm of batches."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(31, 12, mode="mean", padding_idx=0), nn.Linear(12, 8)
        self.norm = nn.BatchNorm1d(12)

    def forward(self, ids):
        return F.normalize(self.out(F.relu(self.norm(self.bag(ids)))), dim=1)


class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.side = Encoder(), nn.Embedding(13, 8)
        self.register_buffer("queue", F.normalize(torch.randn(8, 24), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))

    def forward(self, ids, side):
        q = self.student(ids)
        k = F.normalize(self.side(side), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone()], 1) / 0.3
        if self.training:
            with torch.no_grad():
                at = (self.pointer + torch.arange(len(q))) % self.queue.shape[1]
                self.queue[:, at] = q.detach().T
                self.pointer[0] = (self.pointer[0] + len(q)) % self.queue.shape[1]
        return logits, q, k


class Pairs(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids, self.side = (
            torch.randint(0, 31, (n, 6), generator=g),
            torch.randint(0, 13, (n,), generator=g),
        )

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"ids": self.ids[i], "side": self.side[i]}


def loss(model, batch):
    logits, q, k = model(batch["ids"], batch["side"])
    ones = torch.ones(len(q))
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.int64)) + 0.1 * F.cosine_embedding_loss(
        q, k, ones
    )


def distance(model, batch):
    _, q, k = model(batch["ids"], batch["side"])
    return (q - k).norm(dim=1).mean()


job = ml.Job(
    model=Contrast,
    loss=loss,
    optimizer=lambda named: torch.optim.Adagrad(named, lr=0.05),
    data=lambda: Pairs(22, 0),
    batch_size=8,
    steps=40,
    evaluate=ml.Evaluate(data=lambda: Pairs(9, 1), metrics={"distance": distance}, every=5),
)
