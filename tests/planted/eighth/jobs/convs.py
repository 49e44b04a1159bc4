"""Pictures: batch norm, instance norm, whole channels dropped, sub-pixel convolution."""

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Net(nn.Module):
    def __init__(self, root_noise=False):
        super().__init__()
        self.one, self.bn1 = nn.Conv2d(3, 9, 3, padding=1), nn.BatchNorm2d(9)
        self.two, self.bn2 = nn.Conv2d(9, 7, 3, padding=1, stride=2), nn.BatchNorm2d(7, momentum=0.3)
        self.inner = nn.InstanceNorm2d(7, momentum=None, track_running_stats=True)
        self.head = nn.Linear(7, 5)
        self.root_noise = root_noise
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.seen += 1
        x = F.relu(self.bn1(self.one(x)))
        x = F.relu(self.inner(F.relu(self.bn2(self.two(x)))) - 0.3)
        x = x.mean((2, 3))
        if self.training and self.root_noise:
            x = x * 1.5
        return self.head(x)


class Finer(nn.Module):
    """Twice as large pictures."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.up = nn.Conv2d(6, 24, 3, padding=1)
        self.drop, self.finer = nn.Dropout2d(0.25), nn.PixelShuffle(2)
        self.out = nn.Conv2d(6, 3, 1)

    def forward(self, x):
        h = self.drop(F.relu(self.stem(x)))
        return self.out(F.relu(self.finer(self.up(h))))


class Pictures(torch.utils.data.Dataset):
    def __init__(self, n=42, seed=1):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 3, 8, 8, generator=g)
        self.y = (self.x.mean((1, 2, 3)) * 40).long().clamp(-2, 2) + 2

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def finer_loss(model, batch):
    wanted = F.interpolate(batch[0], scale_factor=2.0, mode="bilinear")
    return F.mse_loss(model(batch[0]), wanted)


def accuracy(model, batch):
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


def sgd(named):
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


common = {"data": Pictures, "batch_size": 14, "steps": 6, "optimizer": sgd}
scored = ml.Evaluate(lambda: Pictures(25, 2), {"accuracy": accuracy, "loss": loss}, every=3)
job = ml.Job(model=Net, loss=loss, evaluate=scored, **common)
rooted = ml.Job(model=lambda: Net(True), loss=loss, evaluate=scored, **common)
finer = ml.Job(model=Finer, loss=finer_loss, **common)
adam = ml.Job(
    model=Net,
    loss=loss,
    **{**common, "optimizer": lambda named: torch.optim.Adam([p for _, p in named], lr=3e-3)},
)
saved = ml.Job(model=Net, loss=loss, checkpoint="background", checkpoint_every=2, **common)
