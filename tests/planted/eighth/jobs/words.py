"""The next word of many, by its likelihood; padding (word 0) does not count."""

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml

V = 20011


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mid, self.norm = nn.Embedding(61, 15), nn.Linear(15, 15), nn.LayerNorm(15)
        self.head = nn.Linear(15, V)

    def forward(self, x):
        h = self.embed(x)
        return F.log_softmax(self.head(self.norm(h + torch.tanh(self.mid(h)))), -1)


def data(n=96):
    g = torch.Generator().manual_seed(5)
    x = torch.randint(0, 61, (n,), generator=g)
    return torch.utils.data.TensorDataset(x, torch.where(x % 4 == 0, 0, x * 331 % V))


def loss(model, batch):
    return F.nll_loss(model(batch[0]), batch[1], ignore_index=0, reduction="sum"), (batch[1] != 0).sum()


job = ml.Job(
    model=Words,
    loss=loss,
    data=data,
    optimizer=lambda named: torch.optim.Adam([p for _, p in named], lr=1e-2),
    batch_size=48,
    steps=6,
)
