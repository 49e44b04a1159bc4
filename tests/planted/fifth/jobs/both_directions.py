"""A recurrent network of two layers in both directions, and one of one behind it, on sequences."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(7, 10, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True)
        self.second = nn.GRU(20, 12, batch_first=True)
        self.head = nn.Linear(12, 9)

    def forward(self, x):
        y, _ = self.inner(x)
        y, _ = self.second(y)
        return self.head(y)


class Waves(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x, self.y = torch.randn(n, 5, 7, generator=g), torch.randint(0, 9, (n, 5), generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def loss(model, batch):
    return F.nll_loss(F.log_softmax(model(batch[0]), -1).flatten(0, 1), batch[1].flatten(), ignore_index=3)


def error(model, batch):
    return (model(batch[0]).argmax(-1) != batch[1]).float().mean()


job = ml.Job(
    model=Speech,
    loss=loss,
    optimizer=lambda named: torch.optim.RMSprop(named, lr=2e-3, momentum=0.5),
    data=lambda: Waves(18, 0),
    batch_size=8,
    steps=40,
    scheduler=lambda o: ml.ByMetric(
        torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5), "error"
    ),
    clip_grad_norm=0.5,
    evaluate=ml.Evaluate(
        data=lambda: Waves(10, 1), metrics={"error": error}, every=4, best="error:min", patience=50
    ),
)
