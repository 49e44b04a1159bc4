"""Learning to learn, and what people do to batches and losses: tasks, mixes, experts that are routed to, fake quantisation."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal

TASKS = {"sx": normal(181, 5, 1), "sy": normal(182, 5, 1), "qx": normal(183, 7, 1), "qy": normal(184, 7, 1)}
SHOTS = {"support": normal(185, 6, 4), "query": normal(186, 5, 4), "label": integers(187, 3, 5)}
DATA = (normal(188, 7), integers(189, 5))


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l1, self.l2, self.l3 = nn.Linear(1, 9), nn.Linear(9, 7), nn.Linear(7, 1)

    def forward(self, x: Tensor, weights: Any = None) -> Tensor:
        if weights is None:
            weights = collections.OrderedDict(self.named_parameters())
        x = F.relu(F.linear(x, weights["l1.weight"], weights["l1.bias"]))
        x = F.relu(F.linear(x, weights["l2.weight"], weights["l2.bias"]))
        return F.linear(x, weights["l3.weight"], weights["l3.bias"])


def _maml(model: Any, b: Any) -> Tensor:
    losses = []
    for i in range(b["sx"].size(0)):
        fast = collections.OrderedDict(model.named_parameters())
        for _ in range(2):
            inner = F.mse_loss(model(b["sx"][i], fast), b["sy"][i])
            grads = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = collections.OrderedDict(
                (n, p - 0.1 * g) for (n, p), g in zip(fast.items(), grads, strict=True)
            )
        losses.append(F.mse_loss(model(b["qx"][i], fast), b["qy"][i]))
    return torch.stack(losses).mean()


def maml_two_steps() -> Job:
    return job_of(Regressor, _maml, TASKS, batch_size=4)


def _first_order(model: Any, b: Any) -> Tensor:
    names = [n for n, _ in model.named_parameters()]

    def task(sx: Tensor, sy: Tensor, qx: Tensor, qy: Tensor) -> Tensor:
        params = dict(model.named_parameters())
        inner = lambda p: F.mse_loss(torch.func.functional_call(model, p, (sx,)), sy)  # noqa: E731
        grads = torch.func.grad(inner)(params)
        fast = {n: params[n] - 0.1 * grads[n].detach() for n in names}
        return F.mse_loss(torch.func.functional_call(model, fast, (qx,)), qy)

    return torch.func.vmap(task)(b["sx"], b["sy"], b["qx"], b["qy"]).mean()


def maml_first_order_vmapped() -> Job:
    return job_of(Regressor, _first_order, TASKS)


def _prototypes(model: Any, b: Any) -> Tensor:
    """Each sample of a batch is an episode; prototypes by loops and boolean masks."""
    losses, way = [], torch.arange(3).repeat_interleave(2)
    for support, query, label in zip(b["support"], b["query"], b["label"], strict=True):
        z, q = model(support), model(query)
        protos = torch.stack([z[way == c].mean(0) for c in torch.unique(way)])
        losses.append(F.cross_entropy(-torch.cdist(q, protos).pow(2), label))
    return sum(losses) / len(losses)


def prototypes() -> Job:
    return job_of(lambda: nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 7)), _prototypes, SHOTS)  # fmt: skip


def _ridge(model: Any, b: Any) -> Tensor:
    """R2D2: a closed-form regressor on top of features."""
    z, q = model(b["support"]), model(b["query"])
    y = F.one_hot(torch.arange(3).repeat_interleave(2), 3).to(z.dtype).expand(z.size(0), -1, -1)
    gram = torch.bmm(z, z.transpose(1, 2)) + model.lam.exp() * torch.eye(6, dtype=z.dtype)
    w = torch.bmm(z.transpose(1, 2), torch.linalg.solve(gram, y))
    return F.cross_entropy((model.scale * torch.bmm(q, w)).reshape(-1, 3), b["label"].reshape(-1))


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 7))
        self.lam, self.scale = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def ridge_regression_head() -> Job:
    return job_of(Features, _ridge, SHOTS)


class HyperNetwork(nn.Module):
    """Weights of two layers from an embedding of each layer and the sample's condition."""

    def __init__(self) -> None:
        super().__init__()
        self.z, self.w1, self.w2 = nn.Parameter(torch.randn(2, 4)), nn.Linear(6, 9), nn.Linear(9, 7 * 7 + 7)
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        for z in self.z:
            h = self.w2(torch.tanh(self.w1(torch.cat([z.expand(x.size(0), -1), x[:, :2]], 1))))
            weight, bias = h.split([49, 7], 1)
            x = torch.tanh(torch.einsum("boi,bi->bo", weight.view(-1, 7, 7) * 0.3, x) + bias)
        return self.head(x)


def _cross_entropy(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def hypernetwork() -> Job:
    return job_of(HyperNetwork, _cross_entropy, DATA)


def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Linear(7, 11), nn.BatchNorm1d(11), nn.ReLU(), nn.Dropout(0.2), nn.Linear(11, 9), nn.ReLU(), nn.Linear(9, 5))  # fmt: skip


def _mixup(model: Any, batch: Any) -> Tensor:
    x, y = batch
    lam = np.random.beta(0.4, 0.4)
    index = torch.randperm(x.size(0))
    y_a, y_b = y, y[index]
    out = model(lam * x + (1 - lam) * x[index, :])
    return lam * F.cross_entropy(out, y_a) + (1 - lam) * F.cross_entropy(out, y_b)


def mixup_in_the_loss() -> Job:
    return job_of(classifier, _mixup, DATA)


def _r_drop(model: Any, batch: Any) -> Tensor:
    x, y = batch
    one, two = model(x), model(x)
    p, q = F.log_softmax(one, -1), F.log_softmax(two, -1)
    kl = F.kl_div(p, q, reduction="none", log_target=True).sum() + F.kl_div(q, p, reduction="none", log_target=True).sum()  # fmt: skip
    return 0.5 * (F.cross_entropy(one, y) + F.cross_entropy(two, y)) + 0.25 * kl / len(x)


def r_drop() -> Job:
    return job_of(classifier, _r_drop, DATA)


def _virtual_adversarial(model: Any, batch: Any) -> Tensor:
    x, y = batch
    with torch.no_grad():
        pred = F.softmax(model(x), dim=1)
    d = F.normalize(torch.rand(x.shape).to(x) - 0.5, dim=1).requires_grad_()
    distance = F.kl_div(F.log_softmax(model(x + 1.0 * d), dim=1), pred, reduction="batchmean")
    d = F.normalize(torch.autograd.grad(distance, d)[0], dim=1)
    lds = F.kl_div(F.log_softmax(model(x + 0.5 * d.detach()), dim=1), pred, reduction="batchmean")
    return F.cross_entropy(model(x), y) + lds


def virtual_adversarial_training() -> Job:
    model = lambda: nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 9), nn.Tanh(), nn.Linear(9, 5))  # noqa: E731  # fmt: skip
    return job_of(model, _virtual_adversarial, DATA)


def _fast_gradient(model: Any, batch: Any) -> Tensor:
    x, y = batch
    adv = x.clone().detach().requires_grad_(True)
    grad = torch.autograd.grad(F.cross_entropy(model(adv), y), adv)[0]
    adv = (adv + 0.1 * grad.sign()).detach()
    return 0.5 * F.cross_entropy(model(x), y) + 0.5 * F.cross_entropy(model(adv), y)


def fast_gradient_sign() -> Job:
    return job_of(lambda: nn.Sequential(nn.Linear(7, 11), nn.ELU(), nn.Linear(11, 5)), _fast_gradient, DATA)


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(width, 13, bias=False), nn.Linear(13, width, bias=False), nn.Linear(width, 13, bias=False)  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SparseMoE(nn.Module):
    """Two of four experts read each row; which rows is found by `where`, and summed by `index_add_`."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.gate, self.experts = (
            nn.Linear(width, 4, bias=False),
            nn.ModuleList([Expert(width) for _ in range(4)]),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(x)
        weights, chosen = torch.topk(F.softmax(logits, dim=1), 2, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        final = torch.zeros_like(x)
        mask = F.one_hot(chosen, num_classes=4).permute(2, 1, 0)
        for index in range(4):
            idx, top_x = torch.where(mask[index])
            current = self.experts[index](x[None, top_x].reshape(-1, x.shape[-1])) * weights[top_x, idx, None]
            final.index_add_(0, top_x, current.to(x.dtype))
        return final, logits


class MoENet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([SparseMoE() for _ in range(2)]), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        logits = []
        for layer in self.layers:
            y, each = layer(x)
            logits.append(each)
            x = x + y
        return self.head(x), logits


def _balanced(model: Any, batch: Any) -> Tensor:
    y, logits = model(batch[0])
    probs = torch.cat(logits).softmax(-1)
    mask = F.one_hot(probs.topk(2, -1)[1], 4)
    balance = torch.sum(torch.mean(mask.to(probs.dtype), dim=0) * torch.mean(probs, dim=0).unsqueeze(0)) * 4
    return F.cross_entropy(y, batch[1]) + 0.02 * balance


def sparse_experts() -> Job:
    return job_of(MoENet, _balanced, DATA)


class SwitchMoE(nn.Module):
    """One expert a row, rows over capacity are passed on, experts in a loop over sorted rows."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(7, 3), nn.ModuleList([Expert(7) for _ in range(3)])
        self.head = nn.Linear(7, 5)
        self.dropped = 0.0

    def forward(self, x: Tensor) -> Tensor:
        prob, chosen = F.softmax(self.router(x), -1).max(-1)
        out, capacity = x.clone(), 3
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().flatten()
            if len(rows) > capacity:
                self.dropped += float(len(rows) - capacity)
                rows = rows[:capacity]
            if len(rows) == 0:
                continue
            out[rows] = out[rows] + prob[rows, None] * expert(x[rows])
        return self.head(out)


def switch_with_capacity() -> Job:
    return job_of(SwitchMoE, _cross_entropy, DATA)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(9, 13), nn.Dropout(0.1), nn.GELU(), nn.Linear(13, 9))  # noqa: E731
        self.one, self.blocks = nn.Linear(7, 9), nn.ModuleList([block() for _ in range(2)])
        self.head = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        for i, block in enumerate(self.blocks):
            x = x + checkpoint(block, x, use_reentrant=i == 1)
        return self.head(x)


def checkpointed_blocks() -> Job:
    return job_of(Checkpointed, _cross_entropy, DATA)


class Batch(NamedTuple):
    x: Tensor
    y: Tensor
    names: list[str]


def _collate(samples: list[Any]) -> Batch:
    return Batch(torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples]), [f"file{i}" for i in range(len(samples))])  # fmt: skip


def named_tuple_batches() -> Job:
    return job_of(classifier, lambda m, b: F.cross_entropy(m(b.x), b.y), DATA, collate=_collate)


def _weighted(model: Any, batch: Any) -> Tensor:
    """Samples whose loss is small count; NaNs would be skipped; the classes' frequencies by numpy."""
    logits, y = model(batch[0]), batch[1]
    losses = F.cross_entropy(logits, y, reduction="none")
    counts = np.bincount(y.detach().cpu().numpy(), minlength=5)
    weights = torch.tensor(1.0 / np.maximum(counts, 1), dtype=losses.dtype)[y]
    order = np.argsort(losses.data.cpu().numpy())
    keep = torch.from_numpy(order[: max(1, int(0.7 * len(order)))].copy())
    loss = torch.sum(losses[keep] * weights[keep]) / torch.sum(weights[keep])
    if torch.isnan(loss):
        raise ValueError("loss is nan")
    return loss


def small_loss_selection() -> Job:
    return job_of(classifier, _weighted, DATA)
