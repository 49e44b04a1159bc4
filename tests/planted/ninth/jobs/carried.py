"""A hidden state that is left for the next step."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import meshloom as ml


def vectors(rows=52, width=9, top=6, seed=5):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=g) * (1 + torch.arange(rows)[:, None] % 5)
    return TensorDataset(x, torch.randint(0, top, (rows,), generator=g))


def class_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def sgd(named):
    return torch.optim.SGD(named, lr=0.1, momentum=0.9)


def _job(model, loss=class_loss, data=vectors, optimizer=sgd, batch_size=13, steps=5, **more):
    return ml.Job(
        model=model, loss=loss, optimizer=optimizer, data=data, batch_size=batch_size, steps=steps, **more
    )


class Core(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(7, 9, batch_first=True)
        self.hidden = None

    def forward(self, x):
        out, hidden = self.rnn(x, self.hidden)
        self.hidden = hidden.detach()
        return out[:, -1]


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Linear(4, 7)
        self.core = Core()
        self.head = nn.Linear(9, 6)

    def forward(self, x):
        return self.head(self.core(torch.tanh(self.front(x))))


def parts():
    g = torch.Generator().manual_seed(11)
    return TensorDataset(torch.randn(48, 5, 4, generator=g) * 2, torch.randint(0, 6, (48,), generator=g))


def lbfgs(named):
    return torch.optim.LBFGS([each for _, each in named], lr=0.3, max_iter=4)


remembers = _job(Remembers, data=parts, batch_size=8, steps=6, shuffle=False)

searched = _job(Remembers, data=parts, batch_size=8, steps=6, shuffle=False, optimizer=lbfgs)
