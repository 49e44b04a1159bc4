"""Layers of their own: spikes, splines on grids, reversible blocks, scans, shaken branches, merged tokens, ternary weights."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal


class Spike(torch.autograd.Function):
    """A step; its gradient is that of a fast sigmoid."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient / (1 + 25 * x.abs()) ** 2


class Leaky(nn.Module):
    """A neuron that keeps its membrane from call to call, until it is reset."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.decay, self.threshold = nn.Parameter(torch.full((width,), 0.9)), nn.Parameter(torch.tensor(1.0))
        self.membrane: Tensor | None = None

    def forward(self, current: Tensor) -> Tensor:
        if self.membrane is None or self.membrane.shape != current.shape:
            self.membrane = torch.zeros_like(current)
        self.membrane = self.decay.clamp(0, 1) * self.membrane + current
        spike = Spike.apply(self.membrane - self.threshold)
        self.membrane = self.membrane - spike.detach() * self.threshold
        return spike


class Spiking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.spikes, self.two, self.out = nn.Linear(7, 12), Leaky(12), nn.Linear(12, 5), Leaky(5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for module in self.modules():
            if isinstance(module, Leaky):
                module.membrane = None
        counts, rates = [], []
        for _ in range(4):
            spikes = self.spikes(self.one(torch.bernoulli(torch.sigmoid(x))))
            rates.append(spikes.mean())
            counts.append(self.out(self.two(spikes)) + self.out.membrane * 0.1)
        return torch.stack(counts).sum(0), torch.stack(rates).mean()


def _counted(model: Any, b: dict[str, Tensor]) -> Tensor:
    counts, rate = model(b["x"])
    return F.cross_entropy(counts, b["y"]) + (rate - 0.2) ** 2


def spiking_network() -> Job:
    return job_of(Spiking, _counted, {"x": normal(701, 7), "y": integers(702, 5)})


class Spline(nn.Module):
    """A layer of B-splines whose grid follows the inputs' quantiles every other call; coefficients are refitted by least squares."""

    def __init__(self, inputs: int, outputs: int, size: int = 4, order: int = 2) -> None:
        super().__init__()
        self.size, self.order, self.calls = size, order, 0
        knots = (torch.arange(-order, size + order + 1) * 2.0 / size - 1).expand(inputs, -1).clone()
        self.register_buffer("grid", knots)
        self.base = nn.Parameter(torch.randn(outputs, inputs) * 0.4)
        self.weight = nn.Parameter(torch.randn(outputs, inputs, size + order) * 0.2)

    def bases(self, x: Tensor) -> Tensor:
        x, grid = x.unsqueeze(-1), self.grid
        found = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).to(x)
        for k in range(1, self.order + 1):
            left = (x - grid[:, : -k - 1]) / (grid[:, k:-1] - grid[:, : -k - 1]) * found[..., :-1]
            right = (grid[:, k + 1 :] - x) / (grid[:, k + 1 :] - grid[:, 1:-k]) * found[..., 1:]
            found = left + right
        return found

    @torch.no_grad()
    def follow(self, x: Tensor) -> None:
        low, high = x.min(0)[0] - 0.1, x.max(0)[0] + 0.1
        step = (high - low) / self.size
        self.grid.copy_(low[:, None] + step[:, None] * torch.arange(-self.order, self.size + self.order + 1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.training and self.calls % 2 == 0:
            self.follow(x)
        return F.linear(F.silu(x), self.base) + torch.einsum("bik,oik->bo", self.bases(x), self.weight)


def splines_on_a_moving_grid() -> Job:
    return job_of(
        lambda: nn.Sequential(Spline(7, 6), Spline(6, 5)),
        lambda m, b: F.cross_entropy(m(b["x"]), b["y"]),
        {"x": normal(711, 7), "y": integers(712, 5)},
    )


class Reversed(torch.autograd.Function):
    """Blocks that keep only their last result: backward computes the inputs again, and adds to the weights' gradients itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: Any) -> Tensor:
        ctx.blocks = blocks
        for block in blocks:
            x = block.both(x)
        ctx.result = x.detach()
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        x = ctx.result
        for block in reversed(ctx.blocks):
            x, gradient = block.undone(x, gradient)
        return gradient, None


class Coupled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh())
        self.g = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh())

    def both(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        with torch.no_grad():
            a = a + self.f(b)
            b = b + self.g(a)
        return torch.cat([a, b], -1)

    def undone(self, y: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = y.chunk(2, -1)
        da, db = gradient.chunk(2, -1)
        with torch.enable_grad():
            a = a.detach().requires_grad_(True)
            ga = self.g(a)
            ga.backward(db)
        b, da = b - ga.detach(), da + a.grad
        with torch.enable_grad():
            b = b.detach().requires_grad_(True)
            fb = self.f(b)
            fb.backward(da)
        a, db = a.detach() - fb.detach(), db + b.grad
        return torch.cat([a, b.detach()], -1), torch.cat([da, db], -1)


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.blocks, self.out = (
            nn.Linear(7, 12),
            nn.ModuleList([Coupled(6), Coupled(6)]),
            nn.Linear(12, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(Reversed.apply(self.into(x), self.blocks))


def reversible_blocks() -> Job:
    return job_of(
        Reversible,
        lambda m, b: F.cross_entropy(m(b["x"]), b["y"]),
        {"x": normal(721, 7), "y": integers(722, 5)},
    )


class Scan(torch.autograd.Function):
    """h <- a h + b along time, in a loop, and its gradient in one backwards."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        h, states = torch.zeros_like(b[:, 0]), []
        for t in range(a.shape[1]):
            h = a[:, t] * h + b[:, t]
            states.append(h)
        out = torch.stack(states, 1)
        ctx.save_for_backward(a, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, out = ctx.saved_tensors
        da, db, carried = torch.zeros_like(a), torch.zeros_like(out), torch.zeros_like(out[:, 0])
        for t in range(a.shape[1] - 1, -1, -1):
            carried = gradient[:, t] + carried
            db[:, t] = carried
            if t:
                da[:, t] = carried * out[:, t - 1]
            carried = carried * a[:, t]
        return da, db


class Selective(nn.Module):
    def __init__(self, width: int = 8, state: int = 3) -> None:
        super().__init__()
        self.state, self.norm, self.into = state, nn.LayerNorm(width), nn.Linear(width, 2 * width, bias=False)
        self.conv = nn.Conv1d(width, width, 3, padding=2, groups=width)
        self.select, self.rate, self.out = (
            nn.Linear(width, 2 * state + 1),
            nn.Linear(1, width),
            nn.Linear(width, width),
        )
        self.log_a = nn.Parameter(torch.log(torch.arange(1, state + 1).float()).repeat(width, 1))
        self.d = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.into(self.norm(x)).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        b, c, rate = torch.split(self.select(u), [self.state, self.state, 1], -1)
        rate = F.softplus(self.rate(rate)).unsqueeze(-1)
        a = torch.exp(-rate * self.log_a.exp())
        h = Scan.apply(a.contiguous(), (rate * b.unsqueeze(2) * u.unsqueeze(-1)).contiguous())
        return x + self.out(((h * c.unsqueeze(2)).sum(-1) + self.d * u) * F.silu(gate))


class Scanning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(11, 8), nn.ModuleList([Selective(), Selective()])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x @ self.embed.weight.T


def selective_scan() -> Job:
    def loss(model: Any, b: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(b["x"][:, :-1]).flatten(0, 1), b["x"][:, 1:].flatten())

    return job_of(Scanning, loss, {"x": integers(731, 11, 9)})


class Shake(torch.autograd.Function):
    """Two branches with drawn weights, others in backward than in forward."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, training: bool) -> Tensor:
        ctx.training = training
        alpha = torch.rand(len(a), 1, 1, 1, dtype=a.dtype) if training else 0.5
        return alpha * a + (1 - alpha) * b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        beta = torch.rand(len(gradient), 1, 1, 1, dtype=gradient.dtype) if ctx.training else 0.5
        return beta * gradient, (1 - beta) * gradient, None


class MixStyle(nn.Module):
    """Statistics of channels mixed between samples, by a drawn permutation, now and then."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or random.random() > 0.5:
            return x
        mean, deviation = (
            x.mean((2, 3), keepdim=True).detach(),
            (x.var((2, 3), keepdim=True) + 1e-6).sqrt().detach(),
        )
        mix = torch.distributions.Beta(0.3, 0.3).sample((len(x), 1, 1, 1)).to(x)
        order = torch.randperm(len(x))
        normed = (x - mean) / deviation
        return (
            normed * (deviation * mix + deviation[order] * (1 - mix)) + mean * mix + mean[order] * (1 - mix)
        )


class Shaken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.style = nn.Conv2d(3, 6, 3, padding=1), MixStyle()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)) for _ in range(2)
        )
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.style(self.stem(x))
        a, b = (branch(x) for branch in self.branches)
        return self.head((x + Shake.apply(a, b, self.training)).relu_().mean((2, 3)))


def shaken_branches() -> Job:
    data = {"x": normal(741, 3, 8, 8), "y": integers(742, 5)}
    return job_of(Shaken, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), data)


class MergedTokens(nn.Module):
    """Attention between halves of the tokens: the most alike are merged, weighted by their sizes."""

    def __init__(self, width: int = 8, merged: int = 2) -> None:
        super().__init__()
        self.merged = merged
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / k.shape[-1] ** 0.5 + size.log().transpose(1, 2)
        x = x + self.out(scores.softmax(-1) @ v)
        with torch.no_grad():
            metric = F.normalize(k, dim=-1)
            one, other = metric[:, ::2], metric[:, 1::2]
            best, where = (one @ other.transpose(1, 2)).max(-1)
            order = best.argsort(-1, descending=True)[..., None]
            kept, gone = order[:, self.merged :], order[:, : self.merged]
            target = where[..., None].gather(1, gone)

        def merge(t: Tensor) -> Tensor:
            source, into = t[:, ::2], t[:, 1::2]
            n, _, c = source.shape
            left = source.gather(1, kept.expand(n, -1, c))
            moved = source.gather(1, gone.expand(n, -1, c))
            return torch.cat([left, into.scatter_add(1, target.expand(n, -1, c), moved)], 1)

        x, size = merge(x * size), merge(size)
        x = x / size
        return x + self.mlp(x), size


class Merging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.layers, self.head = (
            nn.Linear(5, 8),
            nn.ModuleList([MergedTokens(), MergedTokens()]),
            nn.Linear(8, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        x, size = self.patches(x), x.new_ones(*x.shape[:2], 1)
        for layer in self.layers:
            x, size = layer(x, size)
        return self.head((x * size).sum(1) / size.sum(1))


def merged_tokens() -> Job:
    data = {"x": normal(751, 10, 5), "y": integers(752, 4)}
    return job_of(Merging, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), data)


class Ternary(nn.Linear):
    """Weights of -1, 0, 1 and activations of 8 bits, as differences that no gradient sees."""

    def forward(self, x: Tensor) -> Tensor:
        scale = 127.0 / x.abs().max(-1, keepdim=True).values.clamp_(min=1e-5)
        x = x + ((x * scale).round().clamp_(-128, 127) / scale - x).detach()
        mean = self.weight.abs().mean().clamp_(min=1e-5)
        w = self.weight + ((self.weight / mean).round().clamp_(-1, 1) * mean - self.weight).detach()
        return F.linear(F.layer_norm(x, x.shape[-1:]), w, self.bias)


def ternary_weights() -> Job:
    return job_of(
        lambda: nn.Sequential(Ternary(7, 12), nn.GELU(), Ternary(12, 12), nn.GELU(), nn.Linear(12, 5)),
        lambda m, b: F.cross_entropy(m(b["x"]), b["y"]),
        {"x": normal(761, 7), "y": integers(762, 5)},
    )
