"""What forwards write: class centres, the last batch, a teacher, masked weights; draws of generators of modules' own."""

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Centres(nn.Module):
    """Centres of classes, which move by the number of samples that a chunk has of each."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 5)
        self.register_buffer("centre", torch.zeros(3, 5))

    def forward(self, x, y):
        h = torch.tanh(self.body(x))
        away = (h - self.centre[y]).square().sum(1).mean()
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(y, 3).to(h)
                count = hot.sum(0)[:, None]
                rate = 0.5 * count / (1 + count)
                mean = hot.T @ h / count.clamp(min=1)
                self.centre.copy_((1 - rate) * self.centre + rate * mean)
        return away - 0.3 * h.var()


class LastBatch(nn.Module):
    """Keeps what it has made of the newest chunk."""

    def __init__(self):
        super().__init__()
        self.body, self.out = nn.Linear(6, 5), nn.Linear(5, 3)
        self.register_buffer("memory", torch.zeros(0, 5))

    def forward(self, x, y):
        h = torch.tanh(self.body(x))
        h = h - 0.5 * self.memory.mean(0) if len(self.memory) else h
        if self.training:
            self.memory = h.detach()
        return F.cross_entropy(self.out(h), y)


class Teacher(nn.Module):
    """A teacher that follows more and more slowly."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 5), nn.Linear(6, 5).requires_grad_(False)

    def forward(self, x, y):
        rate = 0.5 / (1 + ml.step())
        with torch.no_grad():
            for one, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                one.lerp_(other, rate)
        return (self.student(x) - self.teacher(x + 1)).square().mean() + self.student(x).tanh().mean()


class Bounded(nn.Module):
    """Weights that are held within bounds before they are used."""

    def __init__(self):
        super().__init__()
        self.body, self.out = nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, x, y):
        self.body.weight.data = self.body.weight.data.clamp(-0.2, 0.2)
        return F.cross_entropy(self.out(torch.tanh(self.body(x))), y)


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x):
        return x + 0.5 * torch.randn(x.shape, generator=self.generator)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.one, self.mid, self.other, self.out = (
            nn.Linear(6, 7),
            Noise(),
            nn.Linear(7, 7),
            Noise(),
            nn.Linear(7, 3),
        )

    def forward(self, x, y):
        h = self.mid(torch.tanh(self.one(self.first(x))))
        return F.cross_entropy(self.out(torch.tanh(self.other(h))), y)


class Counts(nn.Module):
    """Draws whose number depends on their arguments; a norm, and a counter of forwards."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.out = nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x, y):
        if self.training:
            self.steps += 1
        h = F.softplus(self.norm(self.body(x)))
        h = h + 0.3 * torch.poisson(h.detach()) / (1 + 0.1 * self.steps)
        return F.cross_entropy(self.out(h), y)


def data(n=45):
    g = torch.Generator().manual_seed(7)
    x = torch.randn(n, 6, generator=g)
    return torch.utils.data.TensorDataset(x, (x[:, 0] > 0.9).long() + (x[:, 1] > 0.3).long())


def made(kind):
    return ml.Job(
        model=kind,
        loss=lambda model, batch: model(*batch),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.2),
        data=data,
        batch_size=15,
        steps=8,
    )


centres, last, teacher, bounded, noisy, counts = map(
    made, (Centres, LastBatch, Teacher, Bounded, Noisy, Counts)
)


class Newest(nn.Module):
    """Remembers the mean of what it was given last."""

    def __init__(self):
        super().__init__()
        self.body, self.mid, self.out = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.register_buffer("newest", torch.zeros(6))

    def forward(self, x, y):
        if self.training:
            self.newest.copy_(x.mean(0))
        return F.cross_entropy(self.out(torch.tanh(self.mid(torch.tanh(self.body(x))))), y)


newest = made(Newest)
