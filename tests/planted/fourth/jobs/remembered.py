"""A recurrent model whose hidden state goes on from step to step; a number that falls; a generator of its own."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Parts(torch.utils.data.Dataset):
    def __init__(self, num_samples, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(num_samples, 5, 4, generator=generator)
        self.y = torch.randn(num_samples, 2, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Carrying(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(4, 7)
        self.rnn = Cell()
        self.head = nn.Linear(9, 2)

    def forward(self, x):
        return self.head(self.rnn(torch.tanh(self.enter(x))))


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(7, 9, batch_first=True)
        self.hidden = None

    def forward(self, x):
        hidden = self.hidden
        if hidden is not None and hidden.shape[1] != len(x):
            hidden = None
        out, hidden = self.gru(x, hidden)
        self.hidden = hidden.detach()
        return out[:, -1]


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = 2.0

    def forward(self, x):
        if self.training:
            self.temperature = self.temperature * 0.9
        return x / self.temperature


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.source = torch.Generator().manual_seed(3)

    def forward(self, x):
        return x + 0.1 * torch.randn(x.shape, generator=self.source) if self.training else x


class Cooling(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(20, 8)
        self.cool = Tempered()
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        return self.out(torch.tanh(self.cool(self.enter(x.flatten(1)))))


class Noisy(Cooling):
    def __init__(self):
        super().__init__()
        self.cool = Noise()


def loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


job = ml.Job(
    model=Carrying,
    loss=loss,
    optimizer=lambda named: torch.optim.Adam([p for _, p in named], lr=1e-2),
    data=lambda: Parts(20, 1),
    batch_size=8,
    steps=40,
    clip_grad_norm=1.0,
    evaluate=ml.Evaluate(lambda: Parts(16, 2), {"loss": loss}, every=4),
    checkpoint_every=4,
    keep_checkpoints=20,
)
cooling = replace(job, model=Cooling)
noisy = replace(job, model=Noisy)
