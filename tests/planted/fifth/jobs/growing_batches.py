"""What changes over a run: frozen layers, batches that grow, mixed samples, averages, two schedules, a best value."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Tune(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(11, 18), nn.GELU(), nn.Linear(18, 18), nn.GELU())
        self.fixed = nn.Linear(11, 18)
        self.fixed.requires_grad_(False)
        self.norm, self.drop, self.head = nn.LayerNorm(18), nn.Dropout(0.15), nn.Linear(18, 5)

    def forward(self, x):
        return self.head(self.drop(self.norm(self.trunk(x) + self.fixed(x))))


class Rows(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x, self.y = torch.randn(n, 11, generator=g), torch.randint(0, 5, (n,), generator=g)
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i] * (1 + 0.1 * self.epoch) + 0.05 * torch.randn(11), "y": self.y[i]}


def mix(batch, others):
    share = torch.rand(()) * 0.5
    return {
        "x": (1 - share) * batch["x"] + share * others["x"],
        "y": batch["y"],
        "other": others["y"],
        "share": share.expand(len(batch["x"])),
    }


def loss(model, batch):
    logits = model(batch["x"])
    own, other = (F.cross_entropy(logits, batch[n], reduction="none") for n in ("y", "other"))
    ml.log("confidence", logits.softmax(-1).amax(-1).mean())
    return ((1 - batch["share"]) * own + batch["share"] * other).mean()


def ce(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def optimizers(named):
    trunk = [p for n, p in named if n.startswith("trunk")]
    rest = [p for n, p in named if not n.startswith("trunk")]
    return [torch.optim.Adam(trunk, lr=4e-3, amsgrad=True), torch.optim.SGD(rest, lr=0.05, momentum=0.9)]


def evaluate(patience):
    return ml.Evaluate(
        data=lambda: Rows(9, 1), metrics={"ce": ce}, every=3, best="ce:min", patience=patience, batch_size=4
    )


job = ml.Job(
    model=Tune,
    loss=loss,
    optimizer=optimizers,
    data=lambda: Rows(26, 0),
    batch_size=10,
    batch_sizes={0: 6, 7: 10},
    steps=40,
    mix=mix,
    scheduler=lambda os: [
        torch.optim.lr_scheduler.ExponentialLR(os[1], 0.97),
        torch.optim.lr_scheduler.StepLR(os[0], 5, 0.7),
    ],
    frozen={"trunk": range(2), "trunk.0.bias": range(6), "norm": range(3, 5)},
    average=0.9,
    clip_grad_norm=2.0,
    evaluate=evaluate(patience=30),
)
impatient = replace(job, evaluate=evaluate(patience=3))
