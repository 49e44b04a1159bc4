"""Metric learning and transport: pairs mined in the batch, proxies, margins that adapt, plans by Sinkhorn, domains that are aligned."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

import meshloom as ml
from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal

DATA = {"x": normal(601, 7), "y": integers(602, 4)}
TWO = {"a": normal(603, 7), "b": normal(604, 5), "y": integers(605, 3)}
SETS = {"a": normal(606, 5, 3), "b": normal(607, 4, 3), "y": integers(608, 2)}


def encoder(inputs: int = 7, width: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 11), nn.LayerNorm(11), nn.GELU(), nn.Linear(11, width))


class Heads(nn.Module):
    """An encoder, a table for each class, and a scale that is learned."""

    def __init__(self, centers: int = 1) -> None:
        super().__init__()
        self.body, self.proxies, self.log_scale = (
            encoder(),
            nn.Parameter(torch.randn(4 * centers, 6)),
            nn.Parameter(torch.tensor(2.0)),
        )
        self.register_buffer("norm_mean", torch.tensor(2.0))
        self.register_buffer("norm_std", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.body(x), dim=-1)


def _multi_similarity(model: Any, b: Any) -> Tensor:
    """Pairs kept by how hard they are, for each anchor; anchors without any are left out."""
    e = model(b["x"])
    similarity, losses = e @ e.T, []
    for i in range(len(e)):
        same = b["y"] == b["y"][i]
        positive = similarity[i][same]
        positive = positive[positive < 1 - 1e-5]
        negative = similarity[i][~same]
        if len(positive) == 0 or len(negative) == 0:
            continue
        hard_negative = negative[negative + 0.3 > positive.min()]
        hard_positive = positive[positive - 0.3 < negative.max()]
        if len(hard_negative) < 1 or len(hard_positive) < 1:
            continue
        up = torch.log(1 + torch.exp(-2 * (hard_positive - 0.5)).sum()) / 2
        down = torch.log(1 + torch.exp(8 * (hard_negative - 0.5)).sum()) / 8
        losses.append(up + down)
    if not losses:
        return (e * 0).sum()
    return sum(losses) / len(e)


def pairs_that_are_hard() -> Job:
    return job_of(Heads, _multi_similarity, DATA)


def _proxy_anchor(model: Any, b: Any) -> Tensor:
    """Over proxies of classes that the batch has, with logsumexp in place of a maximum."""
    cosine = F.linear(model(b["x"]), F.normalize(model.proxies))
    positive = F.one_hot(b["y"], 4).bool()
    with_positive = positive.any(0)
    pull = torch.where(positive, torch.exp(-8 * (cosine - 0.1)), torch.zeros_like(cosine)).sum(0)
    push = torch.where(positive, torch.zeros_like(cosine), torch.exp(8 * (cosine + 0.1))).sum(0)
    return torch.log1p(pull)[with_positive].sum() / with_positive.sum() + torch.log1p(push).mean()


def proxies_of_classes_present() -> Job:
    return job_of(Heads, _proxy_anchor, DATA)


def _adaptive_margin(model: Any, b: Any) -> Tensor:
    """Margins by how long a feature is, against a moving mean of lengths (AdaFace); three centres for each class, the nearest counts."""
    feature = model.body(b["x"])
    norm = feature.norm(dim=-1, keepdim=True)
    cosine = (
        F.linear(feature / norm, F.normalize(model.proxies))
        .view(-1, 4, 3)
        .amax(-1)
        .clamp(-1 + 1e-3, 1 - 1e-3)
    )
    with torch.no_grad():
        safe = norm.clamp(0.001, 100)
        model.norm_mean = safe.mean() * 0.1 + 0.9 * model.norm_mean
        model.norm_std = safe.std() * 0.1 + 0.9 * model.norm_std
        quality = ((safe - model.norm_mean) / (model.norm_std + 1e-3) * 0.33).clamp(-1, 1)
    chosen = torch.zeros_like(cosine).scatter_(1, b["y"][:, None], 1.0)
    theta = (cosine.acos() - 0.4 * quality * chosen).clamp(1e-3, math.pi - 1e-3)
    return F.cross_entropy((theta.cos() - chosen * (0.4 + 0.4 * quality)) * 16, b["y"])


def margins_by_quality() -> Job:
    return job_of(lambda: Heads(3), _adaptive_margin, DATA)


def _circle(model: Any, b: Any) -> Tensor:
    e = model(b["x"])
    similarity, same = e @ e.T, b["y"][:, None] == b["y"][None]
    positive, negative = similarity[same.triu(1)], similarity[(~same).triu(1)]
    ap, an = (-positive.detach() + 1.25).clamp_min(0.0), (negative.detach() + 0.25).clamp_min(0.0)
    return F.softplus(
        torch.logsumexp(an * (negative - 0.25) * 8, 0) + torch.logsumexp(-ap * (positive - 0.75) * 8, 0)
    )


def circle_of_selected_pairs() -> Job:
    return job_of(Heads, _circle, DATA)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = encoder(7), encoder(5)
        self.t, self.bias = nn.Parameter(torch.tensor(math.log(5.0))), nn.Parameter(torch.tensor(-2.0))
        self.register_buffer("memory", F.normalize(torch.randn(9, 6), dim=-1))
        self.register_buffer("ptr", torch.zeros((), dtype=torch.long))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.left(a), dim=-1), F.normalize(self.right(b), dim=-1)


def _sigmoid_pairs(model: Any, b: Any) -> Tensor:
    """A sigmoid for each pair, a margin to the hardest of each row and column, soft targets from similarities within a tower."""
    left, right = model(b["a"], b["b"])
    logits = left @ right.T * model.t.exp() + model.bias
    labels = 2 * torch.eye(len(left)).to(logits) - 1
    pairs = -F.logsigmoid(labels * logits).sum() / len(left)
    off = logits.masked_fill(torch.eye(len(left), dtype=torch.bool), -math.inf)
    hard = F.relu(0.2 + off.max(1)[0] - logits.diag()) + F.relu(0.2 + off.max(0)[0] - logits.diag())
    soft = ((left @ left.T + right @ right.T) / 2).detach().div(0.2).softmax(-1)
    return pairs + hard.mean() + F.cross_entropy(logits, soft)


def sigmoids_of_pairs() -> Job:
    return job_of(TwoTowers, _sigmoid_pairs, TWO)


def _transport(a: Tensor, b: Tensor, epsilon: float = 0.1, rounds: int = 12) -> Tensor:
    """Sinkhorn's plan in logarithms. a: [n, i, d], b: [n, j, d] -> [n, i, j]"""
    cost = torch.cdist(a, b) ** 2
    mu, nu = (
        -math.log(a.size(1)) * torch.ones_like(cost[:, :, 0]),
        -math.log(b.size(1)) * torch.ones_like(cost[:, 0]),
    )
    u, v = torch.zeros_like(mu), torch.zeros_like(nu)
    for _ in range(rounds):
        previous = u
        u = epsilon * (mu - torch.logsumexp((v[:, None] - cost) / epsilon, -1))
        v = epsilon * (nu - torch.logsumexp((u[:, :, None] - cost) / epsilon, 1))
        if (u - previous).abs().sum(-1).mean() < 1e-6:
            break
    plan = torch.exp((u[:, :, None] + v[:, None] - cost) / epsilon)
    return (plan * cost).sum((1, 2))


class SetMatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attn, self.out = (
            nn.Linear(3, 8),
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.Linear(8, 6),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.embed(x))
        return self.out(h + self.attn(h, h, h, need_weights=False)[0])


def _transported(model: Any, b: Any) -> Tensor:
    distance = _transport(model(b["a"]), model(b["b"]))
    return torch.where(b["y"] == 1, distance, F.relu(2.0 - distance)).mean()


def sets_moved_by_sinkhorn() -> Job:
    return job_of(SetMatch, _transported, SETS)


class Reverse(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.neg() * ctx.strength, None


class Domains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes, self.domain = (
            encoder(),
            nn.Linear(6, 4),
            nn.Sequential(nn.Linear(24, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)),
        )
        self.norms = nn.ModuleList([nn.BatchNorm1d(6), nn.BatchNorm1d(6)])

    def forward(self, x: Tensor, domain: int) -> tuple[Tensor, Tensor]:
        h = self.norms[domain](self.body(x))
        return h, self.classes(h)


def _adapted(model: Any, b: Any) -> Tensor:
    """Norms for each domain, a reversed gradient that grows with the step, covariances that are alike, kernels of several widths."""
    (hs, logits), (ht, target) = model(b["x"], 0), model(b["x"].flip(0) * 1.5 + 0.3, 1)
    strength = 2 / (1 + math.exp(-ml.step() / 5)) - 0.9
    crossed = torch.cat(
        [torch.einsum("bi,bj->bij", p.softmax(-1), h).flatten(1) for p, h in ((logits, hs), (target, ht))]
    )
    judged = model.domain(Reverse.apply(crossed, strength)).squeeze(1)
    truth = torch.cat([torch.ones(len(hs)), torch.zeros(len(ht))]).to(judged)
    coral = (torch.cov(hs.T) - torch.cov(ht.T)).square().sum() / (4 * 36)
    both = torch.cat([hs, ht])
    distance = (both[None] - both[:, None]).square().sum(-1)
    width = distance.detach().sum() / (len(both) ** 2 - len(both))
    kernel = sum(torch.exp(-distance / (width * 2.0**i)) for i in (-1, 0, 1))
    n = len(hs)
    mmd = kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean()
    entropy = -(target.softmax(-1) * target.log_softmax(-1)).sum(-1).mean()
    return (
        F.cross_entropy(logits, b["y"])
        + F.binary_cross_entropy_with_logits(judged, truth)
        + coral
        + mmd
        + 0.1 * entropy
    )


def domains_that_are_aligned() -> Job:
    return job_of(Domains, _adapted, DATA)


def _smooth_precision(model: Any, b: Any) -> Tensor:
    """Average precision with sigmoids in place of comparisons (Smooth-AP), by a memory that keeps what it saw."""
    left, right = model(b["a"], b["b"])
    keys = torch.cat([right, model.memory.to(right)])
    scores = left @ keys.T
    difference = torch.sigmoid((scores.unsqueeze(1) - scores.unsqueeze(2)) / 0.05)
    difference = difference * (1 - torch.eye(len(keys))).to(scores)
    rank = 1 + difference.sum(-1)
    same = torch.zeros_like(scores)
    same[:, : len(right)] = (b["y"][:, None] == b["y"][None]).to(scores)
    positive = 1 + (difference * same.unsqueeze(1)).sum(-1)
    with torch.no_grad():
        start = int(model.ptr)
        index = (start + torch.arange(len(right))) % 9
        model.memory[index] = right.detach().to(model.memory.dtype)
        model.ptr.fill_((start + len(right)) % 9)
    return 1 - ((positive / rank) * same).sum(-1).div(same.sum(-1)).mean()


def precision_against_a_memory() -> Job:
    return job_of(TwoTowers, _smooth_precision, TWO)
