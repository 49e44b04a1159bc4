"""Values and losses that are divided over tp, and LBFGS."""

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


def sgd(named):
    return torch.optim.SGD(named, lr=0.2, momentum=0.9)


def _job(model, loss, data=vectors, optimizer=sgd, batch_size=12, steps=4, **more):
    return ml.Job(
        model=model, loss=loss, optimizer=optimizer, data=data, batch_size=batch_size, steps=steps, **more
    )


def text_loss(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


class Huber(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(9, 30), nn.Linear(30, 1100)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def smooth_l1(model, batch):
    return F.smooth_l1_loss(model(batch[0]), torch.sin(torch.arange(1100) + batch[0][:, :1]), beta=0.3)


huber = _job(Huber, smooth_l1, lambda: vectors(400), batch_size=100)


class Means(nn.Module):
    """A mean over time and over features that are divided."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.up, self.out = nn.Linear(12, 62), nn.Linear(12, VOCABULARY)

    def forward(self, x):
        h = self.embed(x)
        level = torch.relu(self.up(h)).mean((1, 2))
        return self.out(h) * (1 + level)[:, None, None]


means = _job(Means, text_loss, lambda: tokens(900), batch_size=300)


class Cropped(nn.Module):
    """A result that is cropped at one side and padded with ones at the other."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(9, 46), nn.Linear(46, 40), nn.Linear(11, 11)

    def forward(self, x):
        return self.c(F.pad(self.b(torch.tanh(self.a(x))), (-32, 3), value=1.0))


cropped = _job(
    Cropped,
    lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    lambda: vectors(240),
    batch_size=60,
)


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(9, 46), nn.Linear(46, 21), nn.Linear(21, 11)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def lbfgs(named):
    return torch.optim.LBFGS([each for _, each in named], lr=0.1, max_iter=3)


searched = _job(Deep, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), optimizer=lbfgs)
