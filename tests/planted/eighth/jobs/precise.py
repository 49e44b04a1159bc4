"""Lower precision: a margin loss that stays in float16, blocks of several layers, a norm with statistics."""

import torch
from torch import nn

import meshloom as ml


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(10, 13), nn.Linear(13, 13), nn.Linear(13, 10)

    def forward(self, x):
        return x + self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Net(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        self.inp = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10) if norm else nn.Identity()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(10, 1)

    def forward(self, x):
        h = self.norm(self.inp(x))
        for block in self.blocks:
            h = block(h)
        return self.out(h)[:, 0]


def data(n=40):
    g = torch.Generator().manual_seed(9)
    x = torch.randn(n, 6, generator=g)
    return torch.utils.data.TensorDataset(x, (x[:, 0] * x[:, 1] > 0).float() * 2 - 1)


def margin(model, batch):
    out = model(batch[0])
    return (1 - out * batch[1].to(out)).clamp(min=0).mean()


common = {
    "optimizer": lambda named: torch.optim.Adam([p for _, p in named], lr=5e-3),
    "data": data,
    "batch_size": 10,
    "steps": 8,
}
job = ml.Job(model=Net, loss=margin, **common)
normed = ml.Job(model=lambda: Net(True), loss=margin, **common)


class Again(Net):
    """The same blocks twice."""

    def forward(self, x):
        h = self.inp(x)
        for _ in range(2):
            for block in self.blocks:
                h = block(h)
        return self.out(h)[:, 0]


again = ml.Job(model=Again, loss=margin, **common)
