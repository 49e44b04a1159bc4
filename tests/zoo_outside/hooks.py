"""More habits of code: gradients that balance, hooked activations, weights from networks, statistics that stand still, annealing."""

from __future__ import annotations

import functools
from collections import OrderedDict
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshloom as ml
from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal, uniform
from tests.zoo_outside.habits import DATA, classify, mlp


class Kendall(nn.Module):
    """Weights of several losses by learned variances, by gradients' norms on a shared layer; a step's weight that warms up."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.a, self.b = nn.Linear(7, 11), nn.Linear(11, 5), nn.Linear(11, 1)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.shared(x))
        return self.a(h), self.b(h).squeeze(-1)


def _uncertainties(model: Any, b: Any) -> Tensor:
    a, r = model(b["x"])
    losses = torch.stack([F.cross_entropy(a, b["y"]), F.huber_loss(r, b["x"].sum(-1))])
    norms = torch.stack(
        [torch.autograd.grad(each, model.shared.weight, retain_graph=True)[0].norm() for each in losses]
    )
    balance = (norms.mean() / (norms + 1e-8)).detach()
    warm = min(1.0, (ml.step() + 1) / 2)
    return (torch.exp(-model.log_vars) * losses * balance + model.log_vars).sum() * warm


def balanced_by_gradients() -> Job:
    return job_of(Kendall, _uncertainties, DATA)


class Hooked(nn.Module):
    """Grad-CAM in training: activations by a forward hook, their gradients by `autograd.grad`, a weight kept by a pre-hook (old spectral
    norm), outputs changed by a hook with kwargs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(1, 5, 3, padding=1),
            nn.utils.spectral_norm(nn.Conv2d(5, 6, 3, padding=1)),
        )
        self.fc, self.kept = nn.Linear(6, 5), OrderedDict()
        self.conv2.register_forward_hook(functools.partial(self._keep, "conv2"))
        self.conv1.register_forward_pre_hook(
            lambda m, args, kwargs: ((args[0] - 0.5,), kwargs), with_kwargs=True
        )

    def _keep(self, name: str, module: nn.Module, args: Any, out: Tensor) -> None:
        self.kept[name] = out

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.conv2(F.relu(self.conv1(x)))).mean((2, 3)))


def _attention_of_gradients(model: Any, b: Any) -> Tensor:
    logits = model(b["x"])
    act = model.kept["conv2"]
    score = logits.gather(1, b["y"].view(-1, 1)).sum()
    grads = torch.autograd.grad(score, act, create_graph=True)[0]
    cam = F.relu((grads.mean((2, 3), keepdim=True) * act).sum(1))
    cam = (cam - cam.amin((1, 2), keepdim=True)) / (cam.amax((1, 2), keepdim=True) + 1e-6)
    return F.cross_entropy(logits, b["y"]) + 0.1 * cam.mean()


def gradients_of_hooked_activations() -> Job:
    return job_of(Hooked, _attention_of_gradients, {"x": uniform(434, 1, 6, 6), "y": DATA["y"]})


class Hyper(nn.Module):
    """Weights of a layer from a network, an embedding bag with weights of its samples, a head whose classes are masked."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.hyper = (
            nn.EmbeddingBag(11, 4, mode="sum"),
            nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 7 * 6 + 6)),
        )
        self.out, self.w = nn.Bilinear(6, 4, 5), nn.Parameter(torch.rand(11))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        weights = self.w[ids].softmax(-1)
        c = self.bag(ids, per_sample_weights=weights)
        p = self.hyper(c)
        w, bias = p[:, : 7 * 6].reshape(-1, 6, 7), p[:, 7 * 6 :]
        return self.out(torch.baddbmm(bias.unsqueeze(-1), w, x.unsqueeze(-1)).squeeze(-1).tanh(), c)


def hypernetwork_with_weighted_bags() -> Job:
    data = {"x": normal(435, 7), "ids": integers(436, 11, 5), "y": DATA["y"]}
    return job_of(Hyper, lambda m, b: F.cross_entropy(m(b["x"], b["ids"]), b["y"]), data)


@contextmanager
def frozen_statistics(model: nn.Module) -> Any:
    """Virtual adversarial training's: batch norms keep their statistics for a while."""

    def switch(m: nn.Module) -> None:
        if isinstance(m, nn.BatchNorm1d):
            m.track_running_stats ^= True

    model.apply(switch)
    yield
    model.apply(switch)


def _consistent(model: Any, b: Any) -> Tensor:
    out = model(b["x"])
    with frozen_statistics(model):
        noisy = model(b["x"] + 0.1 * torch.randn_like(b["x"]))
    l2 = sum(p.pow(2).sum() for n, p in model.named_parameters() if "bias" not in n)
    entropy = -(out.softmax(-1) * out.log_softmax(-1)).sum(-1).mean()
    return F.cross_entropy(out, b["y"]) + F.kl_div(noisy.log_softmax(-1), out.detach().softmax(-1), reduction="batchmean") + 1e-3 * l2 + 0.1 * entropy  # fmt: skip


def statistics_frozen_for_a_while() -> Job:
    model = lambda: nn.Sequential(nn.Linear(7, 11), nn.BatchNorm1d(11), nn.ReLU(), nn.Linear(11, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 5))  # noqa: E731  # fmt: skip
    return job_of(model, _consistent, DATA)


class Curriculum(nn.Module):
    """Stochastic depth with a schedule of probabilities, blocks in a list with `None`s, a temperature annealed by a buffer's count."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = (
            nn.Linear(7, 9),
            nn.ModuleList([nn.Sequential(nn.LayerNorm(9), nn.Linear(9, 9), nn.GELU()) for _ in range(3)]),
        )
        self.skips, self.head = [None, nn.Identity(), None], nn.Linear(9, 5)
        self.register_buffer("seen", torch.tensor(0))
        self.gamma = nn.ParameterList([nn.Parameter(0.1 * torch.ones(9)) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        temperature = max(0.5, 1.0 - 0.01 * self.seen.item())
        x = self.stem(x)
        for i, (block, gamma) in enumerate(zip(self.blocks, self.gamma, strict=True)):
            keep = 1 - 0.2 * (i + 1) / 3
            y = block(x) * gamma
            if self.training:
                mask = x.new_empty((x.shape[0], 1)).bernoulli_(keep)
                y = y * mask.div_(keep)
            if self.skips[i] is not None:
                y = self.skips[i](y) + y
            x = x + y
        return self.head(x) / temperature


def annealed_stochastic_depth() -> Job:
    return job_of(Curriculum, classify, DATA)


def _bootstrapped(model: Any, b: Any) -> Tensor:
    """Labels that are smoothed, mixed with predictions, ignored where unsure; losses sorted, a share forgotten, by numpy's percentile."""
    logits = model(b["x"])
    with torch.no_grad():
        p = logits.softmax(-1)
        soft = torch.full_like(p, 0.1 / 4).scatter_(1, b["y"].unsqueeze(1), 0.9)
        target = 0.8 * soft + 0.2 * p
    losses = -(target * logits.log_softmax(-1)).sum(-1)
    limit = np.percentile(losses.detach().cpu().numpy(), 75)
    keep = losses <= float(limit)
    losses[~keep] = 0
    return losses.sum() / keep.sum().clamp(min=1)


def bootstrapped_labels() -> Job:
    return job_of(mlp, _bootstrapped, DATA)
