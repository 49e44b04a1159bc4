"""Layers of numbers, with optimizers and schedules of many kinds."""

import math

import torch
from torch import nn
from torch.nn import functional as F

import meshloom as ml


class Net(nn.Module):
    def __init__(self, width=37, rare=False):
        super().__init__()
        self.inp, self.mid, self.out = nn.Linear(9, width), nn.Linear(width, 35), nn.Linear(35, 4)
        self.rare = nn.Linear(9, 35) if rare else None

    def forward(self, x):
        h = torch.tanh(self.mid(torch.tanh(self.inp(x))))
        if self.rare is not None and bool((x[:, 0] > 1.6).any()):
            h = h + 0.3 * self.rare(x)
        return self.out(h)


def data(n=60, seed=2):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 9, generator=g)
    return torch.utils.data.TensorDataset(
        x, torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin(), x[:, 3:5].sum(1), x[:, 5].abs()], 1)
    )


def loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


class Late(torch.optim.Optimizer):
    """Sign descent at first; from the third step on steps of one length for a whole parameter."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                g = p.grad
                p.add_(g / (g.norm() + 1e-8) if state["count"] > 2 else g.sign() * 0.05, alpha=-group["lr"])


class Normed(torch.optim.Optimizer):
    """Steps of one length for all of its parameters together."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        grads = [(p, p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(g.square().sum() for _, g in grads).sqrt() + 1e-8
        for p, g in grads:
            p.add_(g / norm, alpha=-self.param_groups[0]["lr"])


def flat(named):
    return [p for _, p in named]


def two(named):
    head = [p for n, p in named if n.startswith("out")]
    return [
        Normed(head, 0.05),
        torch.optim.Adafactor([p for n, p in named if not n.startswith("out")], lr=0.02),
    ]


def plateau(optimizer, threshold=0.1):
    return ml.ByMetric(
        torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.3, patience=0, threshold=threshold, threshold_mode="abs"
        ),
        "loss",
        of=math.exp,
    )


common = {"model": Net, "loss": loss, "data": data, "batch_size": 12, "steps": 6}


def adam(named):
    return torch.optim.Adam(flat(named), lr=5e-3)


evaluation = ml.Evaluate(lambda: data(31, 8), {"loss": loss}, every=1)
job = ml.Job(optimizer=adam, **common)
clipped = ml.Job(
    optimizer=lambda named: torch.optim.SGD(flat(named), lr=0.2, momentum=0.8), clip_grad_norm=30.0, **common
)
averaged = ml.Job(optimizer=adam, average=0.8, evaluate=evaluation, **common)
late = ml.Job(optimizer=lambda named: Late(flat(named), 0.1), **common)
pair = ml.Job(optimizer=two, **common)
lbfgs = ml.Job(
    optimizer=lambda named: torch.optim.LBFGS(flat(named), lr=0.5, max_iter=4, history_size=3), **common
)
stepped = ml.Job(
    optimizer=adam,
    scheduler=lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [5, 5, 8], 0.3),
    **{**common, "steps": 10},
)
by_metric = ml.Job(optimizer=adam, scheduler=plateau, evaluate=evaluation, **common)
seldom = ml.Job(
    optimizer=lambda named: torch.optim.SGD(flat(named), lr=0.1, momentum=0.9, weight_decay=0.05),
    **{**common, "model": lambda: Net(rare=True)},
)

seldom_measured = ml.Job(
    optimizer=adam,
    scheduler=lambda optimizer: plateau(optimizer, 0.3),
    evaluate=ml.Evaluate(lambda: data(31, 8), {"loss": loss}, every=3),
    **{**common, "steps": 9},
)
