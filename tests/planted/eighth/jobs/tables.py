"""Recommending: tables with sparse gradients, with limited rows, bags with weights."""

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Net(nn.Module):
    def __init__(self, limit=None):
        super().__init__()
        self.users = nn.Embedding(41, 7, sparse=limit is None, max_norm=limit)
        self.goods = nn.Embedding(29, 7)
        self.out = nn.Linear(14, 3)

    def forward(self, u, g):
        return self.out(torch.tanh(torch.cat([self.users(u), self.goods(g)], -1)))


def data(n=54):
    g = torch.Generator().manual_seed(6)
    u, v = torch.randint(0, 41, (n,), generator=g), torch.randint(0, 29, (n,), generator=g)
    return torch.utils.data.TensorDataset(u, v, (u * v) % 3)


def loss(model, batch):
    return F.cross_entropy(model(*batch[:2]), batch[2])


def sgd(named):
    return torch.optim.SGD([p for _, p in named], lr=0.3)


common = {"loss": loss, "data": data, "batch_size": 18, "steps": 6}
job = ml.Job(model=Net, optimizer=sgd, **common)
limited = ml.Job(model=lambda: Net(1.5), optimizer=sgd, **common)
