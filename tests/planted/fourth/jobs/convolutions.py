"""Small convolutional networks: residual blocks with batch or group norm, a flip, a U-Net."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Pictures(torch.utils.data.Dataset):
    def __init__(self, num_pictures, seed=1):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(num_pictures, 3, 8, 8, generator=generator)
        self.y = torch.randint(0, 5, (num_pictures,), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index]}


class Residual(nn.Module):
    def __init__(self, channels, wanted, norm):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, wanted, 3, 2, 1)
        self.norm1 = norm(wanted)
        self.conv2 = nn.Conv2d(wanted, wanted, 3, 1, 1)
        self.norm2 = norm(wanted)
        self.short = nn.Conv2d(channels, wanted, 1, 2)

    def forward(self, x):
        inner = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(inner)) + self.short(x))


class Mirror(nn.Module):
    def forward(self, x):
        return x + 0.5 * x.flip(dims=(2, 1))


def in_groups(channels):
    return nn.GroupNorm(2, channels)


class Single(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, 1, 1)
        self.one = Residual(6, 10, in_groups)
        self.out = nn.Linear(10, 5)

    def forward(self, x):
        return self.out(self.one(torch.relu(self.stem(x))).mean((2, 3)))


class Net(nn.Module):
    def __init__(self, norm=nn.BatchNorm2d, rate=0.2, flip=False):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, 1, 1)
        self.one = Residual(6, 10, norm)
        self.two = Residual(10, 14, norm)
        self.drop = nn.Dropout2d(rate)
        self.out = nn.Linear(14, 5)
        self.mirror = Mirror() if flip else nn.Identity()

    def forward(self, x):
        x = self.drop(self.two(self.one(self.stem(x))))
        return self.out(self.mirror(x).mean((2, 3)))


class Fuse(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(12, 7, 3, 1, 1)

    def forward(self, up, down):
        return torch.relu(self.conv(torch.cat([up, down], 1)))


class UNet(nn.Module):
    """What d1 returns is used in the middle and at the end."""

    def __init__(self):
        super().__init__()
        self.d1 = nn.Conv2d(3, 6, 3, 1, 1)
        self.d2 = nn.Conv2d(6, 8, 3, 2, 1)
        self.mid = nn.Conv2d(8, 6, 3, 1, 1)
        self.gn = nn.GroupNorm(3, 6)
        self.up = nn.ConvTranspose2d(6, 6, 2, 2)
        self.fuse = Fuse()
        self.last = nn.Conv2d(7, 5, 1)

    def forward(self, x):
        first = torch.tanh(self.d1(x))
        second = torch.relu(self.d2(first))
        middle = self.gn(self.mid(second) + F.avg_pool2d(first, 2))
        up = self.up(torch.relu(middle))
        return self.last(self.fuse(up, first)).mean((2, 3))


def class_loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def right(model, batch):
    return (model(batch["x"]).argmax(1) == batch["y"]).float().mean()


job = ml.Job(
    model=Net,
    loss=class_loss,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=2e-3, weight_decay=0.05),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.8),
    data=lambda: Pictures(19),
    batch_size=6,
    steps=40,
    evaluate=ml.Evaluate(data=lambda: Pictures(7, 3), metrics={"acc": right, "nll": class_loss}, every=10),
)
group_norm = replace(job, model=lambda: Net(norm=in_groups))
flipped = replace(job, model=lambda: Net(norm=in_groups, flip=True, rate=0.0))
unet = replace(job, model=UNet)
single = replace(job, model=Single)
synced = replace(job, data=lambda: Pictures(20))
