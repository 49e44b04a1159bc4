"""Recurrent layers."""

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(19, 11)
        self.norm = nn.BatchNorm1d(11)
        self.rnn = nn.LSTM(11, 13, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(13, 6)

    def forward(self, x):
        h = self.norm(self.embed(x).transpose(1, 2)).transpose(1, 2)
        return self.head(self.rnn(h)[0])


def data(n=40):
    g = torch.Generator().manual_seed(4)
    x = torch.randint(0, 19, (n, 10), generator=g)
    return torch.utils.data.TensorDataset(x, x.cumsum(1) % 6)


def loss(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


job = ml.Job(
    model=Tagger,
    loss=loss,
    optimizer=lambda named: torch.optim.Adam([p for _, p in named], lr=1e-2),
    data=data,
    batch_size=10,
    steps=6,
)
