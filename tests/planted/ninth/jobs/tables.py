"""Tables and losses over a vocabulary; dropout on a transposed value."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import meshloom as ml

VOCABULARY, PAD = 37, 5


def tokens(rows=24, length=7, top=VOCABULARY):
    g = torch.Generator().manual_seed(3)
    x = torch.randint(0, top, (rows, length), generator=g)
    x[::3, 2] = PAD
    x[1::4, 4] = 24  # = 19 + PAD: the same local row in the second half of the table
    y = torch.randint(0, top, (rows, length), generator=g)
    return TensorDataset(x, y)


def vectors(rows=24, width=9, top=11):
    g = torch.Generator().manual_seed(4)
    return TensorDataset(torch.randn(rows, width, generator=g), torch.randint(0, top, (rows,), generator=g))


class Texts(nn.Module):
    def __init__(self, padding=None):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 20, padding_idx=padding)
        self.up = nn.Linear(20, 44)
        self.down = nn.Linear(44, 20)
        self.head = nn.Linear(20, VOCABULARY)

    def forward(self, x):
        h = self.embed(x)
        h = h + self.down(F.gelu(self.up(h)))
        return self.head(h)


def sgd(named):
    return torch.optim.SGD(named, lr=0.2, momentum=0.9)


def _job(model, loss, data=vectors, optimizer=sgd, batch_size=12, steps=4, **more):
    return ml.Job(
        model=model, loss=loss, optimizer=optimizer, data=data, batch_size=batch_size, steps=steps, **more
    )


def text_loss(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


padded = _job(lambda: Texts(PAD), text_loss, tokens)


def weighted_loss(model, batch):
    weight = torch.linspace(0.2, 1.9, VOCABULARY)
    return F.cross_entropy(
        model(batch[0]).flatten(0, 1), batch[1].flatten(), weight=weight, label_smoothing=0.3
    )


smoothed = _job(Texts, weighted_loss, tokens)


class Turned(nn.Module):
    """Dropout on a transposed tensor: [batch, width, time]."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.up, self.down = nn.Linear(12, 46), nn.Linear(46, 12)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, x):
        h = torch.relu(self.up(self.embed(x)))
        h = F.dropout(h.transpose(1, 2), 0.4, self.training).transpose(1, 2)
        return self.head(self.down(h))


turned = _job(Turned, text_loss, tokens)
