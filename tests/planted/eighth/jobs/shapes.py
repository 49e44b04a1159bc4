"""Layers divided over ranks, with operators between them."""

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Gate(nn.Module):
    """Every other feature gates the one before it."""

    def forward(self, h):
        return h[:, ::2] * torch.sigmoid(h[:, 1::2])


class Strided(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(6, 24), Gate(), nn.Linear(12, 3)

    def forward(self, x):
        return self.down(self.gate(self.up(x)))


class Shift(nn.Module):
    """A number is added, and the mean taken over groups of features."""

    def forward(self, h):
        return (h + 0.7).view(len(h), 3, 6).mean(-1)


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.shift = nn.Linear(6, 10), nn.Linear(10, 18, bias=False), Shift()

    def forward(self, x):
        return self.shift(self.down(torch.relu(self.up(x))))


class Bare(nn.Module):
    """Two pairs of layers without biases."""

    def __init__(self):
        super().__init__()
        sizes = ((6, 10), (10, 6), (6, 14), (14, 3))
        self.up1, self.down1, self.up2, self.down2 = (nn.Linear(*each, bias=False) for each in sizes)

    def forward(self, x):
        h = torch.tanh(self.down1(torch.tanh(self.up1(x))))
        return self.down2(torch.tanh(self.up2(h)))


class Turn(nn.Module):
    """The real part of turned numbers."""

    def forward(self, s):
        return (s * s * torch.complex(torch.tensor(0.5), torch.tensor(0.7))).real


class Waves(nn.Module):
    """Spectra, conjugated between two layers."""

    def __init__(self):
        super().__init__()
        self.one, self.turn, self.two = nn.Linear(6, 9), Turn(), nn.Linear(9, 3)

    def forward(self, x):
        return self.two(self.turn(torch.fft.fft(self.one(x)).conj()))


def data(n=36):
    g = torch.Generator().manual_seed(8)
    x = torch.randn(n, 6, generator=g)
    return torch.utils.data.TensorDataset(x, torch.stack([x[:, 0] * x[:, 1], x[:, 2], x[:, 3].abs()], 1))


def loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def made(kind):
    return ml.Job(
        model=kind,
        loss=loss,
        optimizer=lambda named: torch.optim.Adam([p for _, p in named], lr=1e-2),
        data=data,
        batch_size=12,
        steps=6,
    )


strided, shifted, bare, waves = map(made, (Strided, Shifted, Bare, Waves))
