"""Samples of several kinds, each with a layer of its own, which a chunk without such samples does not use."""

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Kinds(torch.utils.data.Dataset):
    """Kinds alternate in the first batch, and lie in runs of `run` afterwards."""

    def __init__(self, samples=40, run=4, first=8):
        g = torch.Generator().manual_seed(3)
        self.x, self.y = torch.randn(samples, 7, generator=g), torch.randn(samples, 3, generator=g)
        self.kind = [i % 2 if i < first else (i // run) % 2 for i in range(samples)]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], torch.tensor(self.kind[i]), self.y[i]


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(7, 11)
        self.experts = nn.ModuleList(nn.Linear(11, 9) for _ in range(2))
        self.out = nn.Linear(9, 3)

    def forward(self, x, kind):
        hidden = torch.tanh(self.inp(x))
        mixed = hidden.new_zeros(len(x), 9)
        for number, expert in enumerate(self.experts):
            at = (kind == number).nonzero()[:, 0]
            if len(at):
                mixed = mixed.index_put((at,), expert(hidden[at]))
        return self.out(F.relu(mixed))


def loss(model, batch):
    x, kind, y = batch
    return F.mse_loss(model(x, kind), y)


def routed(**changes):
    settings = {
        "model": Routed, "loss": loss, "optimizer": lambda named: torch.optim.AdamW(named, lr=0.02, weight_decay=0.1),
        "data": Kinds, "batch_size": 8, "steps": 10, "shuffle": False,
    }  # fmt: skip
    return ml.Job(**{**settings, **changes})


def sgd():
    """Momentum: what is unused keeps its momentum and does not move."""
    return routed(optimizer=lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9, weight_decay=0.05))


def runs_of_two():
    """Of four chunks of two samples two have one kind, two the other."""
    return routed(data=lambda: Kinds(run=2))


def muon():
    def optimizer(named):
        matrices = [each for name, each in named if each.ndim == 2]
        return [
            torch.optim.Muon(matrices, lr=0.02, weight_decay=0.3),
            torch.optim.AdamW([each for _, each in named if each.ndim != 2], lr=0.01),
        ]

    return routed(data=lambda: Kinds(run=8, samples=48), optimizer=optimizer)
