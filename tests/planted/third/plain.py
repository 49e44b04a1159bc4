"""Jobs of the third list with a convolutional network and a residual MLP."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml
from tests.planted.third.sequences import Rows

# CNN.


class CNN(nn.Module):
    def __init__(self, momentum=0.2, p=0.1):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, momentum=momentum)
        self.c2, self.b2 = nn.Conv2d(6, 10, 3, padding=1), nn.BatchNorm2d(10, momentum=momentum)
        self.drop, self.out = nn.Dropout(p), nn.Linear(10, 5)

    def forward(self, x):
        x = F.relu(self.b1(self.c1(x)))
        x = F.max_pool2d(x, 2)
        x = F.relu(self.b2(self.c2(x)))
        return self.out(self.drop(x.mean((2, 3))))


def picture(g, i):
    y = int(torch.randint(0, 5, (), generator=g))
    return {"x": torch.randn(3, 9, 9, generator=g) + 0.3 * y, "y": y}


def augmented(item):
    return {**item, "x": item["x"] + 0.2 * torch.randn(item["x"].shape)}


def class_loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def class_right(model, batch):
    return (model(batch["x"]).argmax(1) == batch["y"]).float().mean()


def cnn(momentum=0.2, p=0.1, draws=None):
    return ml.Job(
        model=lambda: CNN(momentum, p),
        loss=class_loss,
        optimizer=lambda named: torch.optim.SGD(
            [q for _, q in named], lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3
        ),
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.7),
        data=lambda: Rows(31, picture, draws),
        batch_size=12,
        steps=12,
        seed=3,
        evaluate=ml.Evaluate(
            data=lambda: Rows(13, picture),
            metrics={"right": class_right, "loss": class_loss},
            every=2,
            batch_size=6,
        ),
    )


# residual MLP with LayerScale, two optimizers.


class Scaled(nn.Module):
    def __init__(self, d, hidden):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, hidden), nn.Linear(hidden, d)
        self.gamma = nn.Parameter(torch.full((d,), 1e-2))

    def forward(self, x):
        return x + self.gamma * self.down(F.gelu(self.up(self.norm(x))))


class Residual(nn.Module):
    def __init__(self, d=13, hidden=29, layers=3):
        super().__init__()
        self.inp = nn.Linear(7, d)
        self.blocks = nn.ModuleList([Scaled(d, hidden) for _ in range(layers)])
        self.out = nn.Linear(d, 3)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def vector(g, i):
    x = torch.randn(7, generator=g)
    return {"x": x, "y": torch.stack([x.sum(), x[0] * x[1], x[2].abs()])}


def mse(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def mae(model, batch):
    return (model(batch["x"]) - batch["y"]).abs().mean()


def residual(**changes):
    job = ml.Job(
        model=Residual,
        loss=mse,
        optimizer=lambda named: [
            torch.optim.AdamW([p for n, p in named if "gamma" not in n], lr=5e-3, weight_decay=0.05),
            torch.optim.SGD([p for n, p in named if "gamma" in n], lr=0.1, momentum=0.8),
        ],
        scheduler=lambda o: [
            torch.optim.lr_scheduler.CosineAnnealingLR(o[0], 9),
            torch.optim.lr_scheduler.ExponentialLR(o[1], 0.8),
        ],
        clip_grad_norm=1.0,
        data=lambda: Rows(26, vector),
        batch_size=11,
        steps=12,
        seed=9,
        evaluate=ml.Evaluate(
            data=lambda: Rows(15, vector), metrics={"mse": mse, "mae": mae}, every=2, batch_size=8
        ),
    )
    return replace(job, **changes)


def deep():
    return residual(model=lambda: Residual(layers=5))


def units():
    return replace(deep(), units=(Scaled,))


def wide():  # parameters of over 1,024 elements
    return residual(model=lambda: Residual(d=33, hidden=47, layers=2))


def averaged():
    return residual(average=0.7)


def adafactor():
    return residual(
        optimizer=lambda named: torch.optim.Adafactor([p for _, p in named], lr=0.02), scheduler=None
    )


def background():
    return residual(checkpoint="background", checkpoint_every=2)


def frozen():
    return residual(frozen={"blocks.1": range(1, 3)})


def growing():
    return residual(batch_sizes={0: 5, 2: 11})


def mixup(batch, others):
    share = torch.rand(())
    return {k: share * batch[k] + (1 - share) * others[k] for k in batch}


def mixed():
    return residual(mix=mixup)


class Stream(torch.utils.data.IterableDataset):
    def __init__(self):
        self.rows = Rows(26, vector)

    def __iter__(self):
        for i in torch.randperm(len(self.rows)).tolist():
            item = self.rows[i]
            yield {**item, "x": item["x"] + 0.1 * torch.randn(7)}


def stream():
    return residual(data=Stream)


def noisy_mse(model, batch):
    return F.mse_loss(model(batch["x"] + 0.1 * torch.randn_like(batch["x"])), batch["y"])


def noisy():
    return residual(
        evaluate=ml.Evaluate(
            data=lambda: Rows(15, vector), metrics={"noisy": noisy_mse}, every=2, batch_size=8
        )
    )


def annealed(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"] * (1 - 0.5 ** (ml.step() + 1)))


def stepping():
    return residual(loss=annealed)


def gentle():
    return residual(clip_grad_norm=50.0)


def plateau():
    return residual(
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9),
        scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(
            o, patience=0, factor=0.5, threshold=0.3
        ),
    )
