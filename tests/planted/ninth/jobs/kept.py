"""Batch norm, numbers in attributes, buffers without a shape."""

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


class Normed(nn.Module):
    def __init__(self, momentum=0.1):
        super().__init__()
        self.a, self.norm = nn.Linear(9, 21), nn.BatchNorm1d(21, momentum=momentum)
        self.b = nn.Linear(21, 6)

    def forward(self, x):
        return self.b(torch.tanh(self.norm(self.a(x))))


held_out = ml.Evaluate(data=lambda: vectors(19, seed=6), metrics={"loss": class_loss}, every=2)

normed = _job(Normed)

cumulative = _job(lambda: Normed(None), data=lambda: vectors(64), evaluate=held_out, batch_size=16)


class Cooling(nn.Module):
    """A temperature that every forward lowers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(9, 21), nn.Linear(21, 6)
        self.temperature = 4.0

    def forward(self, x):
        self.temperature = 0.8 * self.temperature + 0.1
        return self.b(torch.relu(self.a(x))) / self.temperature


cooling = _job(
    Cooling,
    evaluate=ml.Evaluate(data=lambda: vectors(19, seed=6), metrics={"loss": class_loss}, every=2),
    batch_size=12,
)


class Observed(nn.Module):
    """Scales by what it has seen, of which it knows not even the shape at first."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(9, 21), nn.Linear(21, 6)
        self.register_buffer("level", torch.zeros(0))

    def forward(self, x):
        h = self.a(x)
        if self.training:
            now = h.detach().abs().mean(0)
            self.level = now if not self.level.numel() else 0.95 * self.level + 0.05 * now
        return self.b(h / (0.1 + self.level))


observed = _job(Observed, batch_size=12)
