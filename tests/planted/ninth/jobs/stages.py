"""Tied weights, skips over stages, averages, background checkpoints."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import meshloom as ml

V = 23


def tokens(rows=40, length=5):
    g = torch.Generator().manual_seed(8)
    return TensorDataset(
        torch.randint(0, V, (rows, length), generator=g), torch.randint(0, V, (rows, length), generator=g)
    )


def vectors(rows=40, width=9, top=6, seed=9):
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(rows, width, generator=g), torch.randint(0, top, (rows,), generator=g))


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Tied(nn.Module):
    """The embedding is the head, too."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, 15)
        self.blocks = nn.ModuleList(Block(15, 27) for _ in range(4))
        self.head = nn.Linear(15, V)
        self.head.weight = self.embed.weight

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def text_loss(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def class_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def adam(named):
    return torch.optim.AdamW(named, lr=0.02)


def sgd(named):
    return torch.optim.SGD(named, lr=0.2, momentum=0.9)


def _job(model, loss, data, optimizer=adam, batch_size=12, steps=5, **more):
    return ml.Job(
        model=model, loss=loss, optimizer=optimizer, data=data, batch_size=batch_size, steps=steps, **more
    )


averaged = _job(
    Tied,
    text_loss,
    tokens,
    average=0.6,
    evaluate=ml.Evaluate(
        data=lambda: TensorDataset(*(each[:17] for each in tokens(20).tensors)),
        metrics={"loss": text_loss},
        every=2,
    ),
)

written = _job(Tied, text_loss, tokens, checkpoint="background", checkpoint_every=2, keep_checkpoints=9)


class Skips(nn.Module):
    """A value that two later stages read."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(9, 17)
        self.second, self.third = Block(17, 31), Block(17, 31)
        self.head = nn.Linear(17, 6)

    def forward(self, x):
        a = torch.tanh(self.first(x))
        b = self.second(a)
        return self.head(self.third(b) * torch.sigmoid(a) + a)


skips = _job(Skips, class_loss, vectors, sgd)


class Targets(nn.Module):
    """Looks up its input in the table of its head, which that does not train."""

    def __init__(self):
        super().__init__()
        self.embed, self.a, self.b = nn.Embedding(V, 15), Block(15, 27), Block(15, 29)
        self.head = nn.Linear(15, V, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.b(self.a(self.embed(x).detach())))


detached = _job(Targets, text_loss, tokens)
