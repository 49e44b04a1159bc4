"""Forwards whose own code cannot be read, between layers that can: values that are looked at, numpy, lists, orders, own functions and hooks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import adam, integers, job_of, normal, sgd

VEC = {"x": normal(9101, 7), "y": integers(9102, 3)}
SEQ = {"x": normal(9103, 9, 5), "y": integers(9104, 3)}
TOK = {"t": integers(9107, 23, 11)}


def _classes(model: Any, b: Any) -> Tensor:
    return F.cross_entropy(model(b["x"]), b["y"])


def _next(model: Any, b: Any) -> Tensor:
    return F.cross_entropy(model(b["t"][:, :-1]).flatten(0, 1), b["t"][:, 1:].flatten())


class Block(nn.Module):
    def __init__(self, d: int, h: int) -> None:
        super().__init__()
        self.n, self.a, self.b = nn.LayerNorm(d), nn.Linear(d, h), nn.Linear(h, d)

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        h = F.gelu(self.a(self.n(x)))
        return x + scale * self.b(h), {"h": h, "m": h.mean(-1)}


class Clipping(nn.Module):
    """tied head, own parameter, dictionary results, a look at values twice"""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(23, 9)
        self.pos = nn.Parameter(torch.randn(11, 9) * 0.1)
        self.blocks = nn.ModuleList([Block(9, 15), Block(9, 13)])
        self.head = nn.Linear(9, 23, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, t: Tensor) -> Tensor:
        x = self.emb(t) + self.pos[: t.shape[1]]
        kept = []
        for i, block in enumerate(self.blocks):
            x, extra = block(x, scale=0.5 + i)
            kept.append(extra["m"])
            top = x.abs().max()
            if top > 2:
                x = x / top * 2
        gates = torch.stack(kept).softmax(0)
        if not torch.isfinite(gates).all():
            raise ValueError("not finite")
        return self.head(x * gates.sum(0).unsqueeze(-1))


def clipped_by_their_largest() -> Job:
    return job_of(Clipping, _next, TOK)


class Shared(nn.Module):
    """one block three times, its scale from an item of its own result"""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.block, self.out = nn.Linear(5, 7), nn.GRU(7, 7, batch_first=True), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, state = self.inp(x), None
        for _ in range(3):
            h, state = self.block(h, state)
            h = h / max(h.detach().abs().max().item(), 0.5)
        return self.out(h[:, -1])


def scaled_by_an_item() -> Job:
    return job_of(Shared, _classes, SEQ)


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l1, self.l2, self.l3 = nn.Linear(7, 11), nn.Linear(11, 9), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.l1(x))
        if h.requires_grad:
            h.register_hook(lambda g: g.clamp(-0.02, 0.02))
        h = self.l2(h)
        if h.requires_grad:
            h.register_hook(lambda g: g / (g.norm() + 1))
        return self.l3(torch.relu(h))


def gradients_clipped_between_layers() -> Job:
    return job_of(Hooked, _classes, VEC)


class Ste(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        ctx.t = temperature
        hard = (x > 0).to(x.dtype)
        return hard, hard.mean()

    @staticmethod
    def backward(ctx: Any, g: Tensor, gm: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x / ctx.t)
        flat = (g + gm / x.numel()) * s * (1 - s) / ctx.t
        return flat * (flat.abs() < flat.abs().mean() * 3), None


class Straight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 9))
        self.dec = nn.Sequential(nn.Linear(9, 13), nn.Dropout(0.2), nn.ReLU(), nn.Linear(13, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hard, rate = Ste.apply(self.enc(x), 0.7)
        return self.dec(hard), rate


def _rate(model: Any, b: Any) -> Tensor:
    out, rate = model(b["x"])
    return F.cross_entropy(out, b["y"]) + (rate - 0.3) ** 2


def straight_through_between_two_parts() -> Job:
    return job_of(Straight, _rate, VEC)


class ByNumpy(nn.Module):
    """a mask from numpy, batch norm within the layers, one way frozen"""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13), nn.ReLU())
        self.teacher = nn.Linear(7, 13)
        self.b = nn.Sequential(nn.Linear(13, 11), nn.ReLU(), nn.Linear(11, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            aim = self.teacher(x)
        values = h.detach().cpu().numpy()
        mask = torch.from_numpy((values > np.median(values, axis=1, keepdims=True)).astype(np.float64)).to(h)
        h = h * mask + 0.1 * aim
        return self.b(h)


def masks_by_numpy_between_layers() -> Job:
    return job_of(ByNumpy, _classes, VEC)


class Places(nn.Module):
    """in place into what own code made; results of modules kept in a list and a dict"""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 9)
        self.att = nn.MultiheadAttention(9, 3, batch_first=True)
        self.mix = nn.ModuleDict({"a": nn.Linear(9, 9), "b": nn.Linear(9, 9)})
        self.out = nn.Linear(18, 3)

    def forward(self, x: Tensor) -> Tensor:
        feats: dict[str, Tensor] = {}
        h = self.up(x)
        o, w = self.att(h, h, h)
        best = w.detach().amax((1, 2)).tolist()
        buf = torch.zeros_like(h)
        buf += o
        for row, each in enumerate(best):
            buf[row] *= min(each, 1.0)
        for name in ("a", "b"):
            feats[name] = self.mix[name](buf)
        joined = torch.cat([*feats.values()], -1)
        return self.out(joined.amax(1))


def rows_scaled_in_place_by_lists() -> Job:
    return job_of(Places, _classes, SEQ)


class Sorted(nn.Module):
    """two inputs each, results reordered by values; modules called with keyword arguments and through zip"""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(7, 11)
        self.bil = nn.Bilinear(11, 11, 5)
        self.out = nn.Linear(5, 3)
        self.gain = nn.Parameter(torch.ones(11))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enc(input=x)) * self.gain
        order = sorted(range(len(h)), key=lambda i: float(h[i].detach().sum()))
        z = self.bil(h, h[torch.tensor(order)])
        back = [0] * len(order)
        for place, each in enumerate(order):
            back[each] = place
        return self.out(torch.stack([z[each] for each in back]))


def rows_in_a_sorted_order() -> Job:
    return job_of(Sorted, _classes, VEC)


class Inner(nn.Module):
    """the unreadable code one level down, in the module with most parameters"""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(7, 19), Block(7, 21)])
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, *, limit: float) -> dict[str, Any]:
        outs = []
        for block in self.blocks:
            x, extra = block(x)
            if (x * self.scale).norm() > limit:
                x = x * (limit / x.detach().norm().item())
            outs.append([x, (extra["m"],)])
        return {"last": x, "all": outs}


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(7, 7), Inner(), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(torch.relu(self.first(x)), limit=2.0)
        return self.last(found["last"]) + found["all"][0][1][0].mean()


def inner_code_with_nested_results() -> Job:
    return job_of(Outer, _classes, VEC)


class Twice(nn.Module):
    """weight norm and spectral norm within; the model is called twice by the loss"""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(7, 13))
        self.b = nn.utils.parametrizations.spectral_norm(nn.Linear(13, 9))
        self.c = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.elu(self.a(x))
        if float(h.min()) < -0.9:
            h = h + 0.1
        h = self.b(h)
        return self.c(h - h.mean(0).detach())


def _twice(model: Any, b: Any) -> Tensor:
    one, two = model(b["x"]), model(b["x"] * 3)
    return F.cross_entropy(one, b["y"]) + 0.1 * F.mse_loss(one, two.detach())


def called_twice_by_the_loss() -> Job:
    return job_of(Twice, _twice, VEC, optimizer=sgd)


class Attend(nn.Module):
    """quiet code first, then values; complex and integer results between layers"""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(23, 7)
        self.code = nn.Embedding(5, 7)
        self.mix, self.out = nn.Linear(14, 11), nn.Linear(11, 23)

    def forward(self, t: Tensor) -> Tensor:
        x = self.emb(t)
        spec = torch.fft.rfft(x, dim=-1)
        kinds = (spec.abs().sum(-1).detach() * 2).long() % 5
        used = set(kinds.flatten().tolist())
        c = self.code(kinds)
        if len(used) > 3:
            c = c * 0.5
        h = torch.cat([x + torch.fft.irfft(spec * 0.5, n=7, dim=-1), c], -1)
        return self.out(torch.tanh(self.mix(h)))


def codes_counted_between_layers() -> Job:
    return job_of(Attend, _next, TOK, optimizer=adam)
