"""Recurrences and experts: scans over time in every form that is about, and layers whose tokens are sent to some of their parts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal

LENGTH, WIDTH, VOCABULARY = 9, 12, 17
TEXT = {"ids": integers(521, VOCABULARY, LENGTH + 1)}
SERIES = {"x": normal(522, LENGTH, 5), "y": normal(523, LENGTH)}


def next_token(model: Any, b: Any) -> Tensor:
    return F.cross_entropy(model(b["ids"][:, :-1]).flatten(0, 1), b["ids"][:, 1:].flatten())


class Stack(nn.Module):
    def __init__(self, mixer: Any, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList([mixer() for _ in range(layers)])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(layers)])
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places[: ids.size(1)]
        x = x + x.mean(
            1, keepdim=True
        )  # no two tokens are alike, or rounding would decide which is among the largest
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


class LinearAttention(nn.Module):
    """Features by elu, sums over the past by cumsum."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (3, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        kv = torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)
        normaliser = torch.einsum("bhtd,bhtd->bht", q, k.cumsum(2)).clamp(min=1e-6)
        y = torch.einsum("bhtd,bhtde->bhte", q, kv) / normaliser.unsqueeze(-1)
        return self.out(y.transpose(1, 2).flatten(2))


def linear_attention_by_cumsum() -> Job:
    return job_of(lambda: Stack(LinearAttention), next_token, TEXT)


class Retention(nn.Module):
    """Decays by head in a table of distances, in parallel; a group norm, a swish gate (RetNet)."""

    def __init__(self, heads: int = 3) -> None:
        super().__init__()
        self.heads, self.group = heads, nn.GroupNorm(heads, WIDTH, affine=False)
        self.q, self.k, self.v, self.g, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5))
        self.register_buffer("gamma", 1 - torch.exp(torch.linspace(math.log(1 / 4), math.log(1 / 64), heads)))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        n = torch.arange(t)
        distance = (n[:, None] - n[None]).clamp(min=0)
        decay = (self.gamma.to(x)[:, None, None] ** distance) * (n[:, None] >= n[None])
        decay = decay / decay.sum(-1, keepdim=True).sqrt()
        q, k, v = (f(x).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-1, -2)) / 2 * decay
        scores = scores / scores.detach().sum(-1, keepdim=True).abs().clamp(min=1)
        y = (scores @ v).transpose(1, 2).reshape(b * t, WIDTH)
        return self.o(self.group(y).view(b, t, WIDTH) * F.silu(self.g(x)))


def retention_with_decays() -> Job:
    return job_of(lambda: Stack(Retention), next_token, TEXT)


class TimeMix(nn.Module):
    """RWKV's time mixing: a shift, a loop with a running maximum, a decay of each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.first = (
            nn.Parameter(torch.linspace(-3, 1, WIDTH)),
            nn.Parameter(torch.zeros(WIDTH) + 0.3),
        )
        self.mix = nn.ParameterDict({n: torch.linspace(0, 1, WIDTH)[None, None] for n in "kvr"})
        self.key, self.value, self.receptance, self.output = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.shift = nn.ZeroPad2d((0, 0, 1, -1))

    def forward(self, x: Tensor) -> Tensor:
        before = self.shift(x)
        k, v, r = (x * self.mix[n] + before * (1 - self.mix[n]) for n in "kvr")
        k, v, r = self.key(k), self.value(v), torch.sigmoid(self.receptance(r))
        w = -torch.exp(self.decay)
        num, den, top = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), torch.full_like(k[:, 0], -1e38)
        out = []
        for t in range(x.size(1)):
            high = torch.maximum(top, self.first + k[:, t])
            a, b = torch.exp(top - high), torch.exp(self.first + k[:, t] - high)
            out.append((a * num + b * v[:, t]) / (a * den + b))
            high = torch.maximum(top + w, k[:, t])
            a, b = torch.exp(top + w - high), torch.exp(k[:, t] - high)
            num, den, top = a * num + b * v[:, t], a * den + b, high
        return self.output(r * torch.stack(out, 1))


def time_mixing() -> Job:
    return job_of(lambda: Stack(TimeMix), next_token, TEXT)


class Delta(nn.Module):
    """The delta rule with a gate: a matrix of state that is corrected at each step (gated DeltaNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.beta, self.alpha, self.out = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, 3),
            nn.Linear(WIDTH, 3),
            nn.Linear(WIDTH, WIDTH),
        )
        self.conv = nn.Conv1d(3 * WIDTH, 3 * WIDTH, 3, groups=3 * WIDTH, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        qkv = F.silu(self.conv(self.qkv(x).transpose(1, 2))[..., :t]).transpose(1, 2)
        q, k, v = qkv.view(b, t, 3, 3, 4).unbind(2)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        beta, alpha = torch.sigmoid(self.beta(x)), torch.exp(-F.softplus(self.alpha(x)))
        state, out = x.new_zeros(b, 3, 4, 4), torch.empty_like(v)
        for i in range(t):
            state = state * alpha[:, i, :, None, None]
            error = v[:, i] - torch.einsum("bhkv,bhk->bhv", state, k[:, i])
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, i], beta[:, i, :, None] * error)
            out[:, i] = torch.einsum("bhkv,bhk->bhv", state, q[:, i])
        return self.out(out.flatten(2))


def gated_delta_rule() -> Job:
    return job_of(lambda: Stack(Delta), next_token, TEXT)


def _associative(a: Tensor, b: Tensor) -> Tensor:
    """h[t] = a[t] h[t-1] + b[t] by doubling."""
    step = 1
    while step < a.size(1):
        b = torch.cat([b[:, :step], b[:, step:] + a[:, step:] * b[:, :-step]], 1)
        a = torch.cat([a[:, :step], a[:, step:] * a[:, :-step]], 1)
        step *= 2
    return b


class Selective(nn.Module):
    """Mamba's step: sizes of steps, inputs and outputs chosen by the input; the scan by doubling."""

    def __init__(self, state: int = 3) -> None:
        super().__init__()
        self.in_proj, self.x_proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 + 2 * state)
        self.dt_proj, self.out_proj = nn.Linear(2, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.log_a, self.d = (
            nn.Parameter(torch.log(torch.arange(1.0, state + 1)).repeat(WIDTH, 1)),
            nn.Parameter(torch.ones(WIDTH)),
        )

    def forward(self, x: Tensor) -> Tensor:
        x, z = self.in_proj(x).chunk(2, -1)
        x = F.silu(x)
        dt, b, c = self.x_proj(x).split([2, 3, 3], -1)
        dt = F.softplus(self.dt_proj(dt))
        a = torch.exp(dt.unsqueeze(-1) * -torch.exp(self.log_a))
        h = _associative(a, (dt * x).unsqueeze(-1) * b.unsqueeze(2))
        return self.out_proj((torch.einsum("btdn,btn->btd", h, c) + self.d * x) * F.silu(z))


def selective_scan_by_doubling() -> Job:
    return job_of(lambda: Stack(Selective), next_token, TEXT)


class LongConvolution(nn.Module):
    """Filters as long as the text, made by a small network of positions, applied by FFT (Hyena)."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.out, self.bias = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Parameter(torch.randn(WIDTH)),
        )
        self.filter = nn.Sequential(nn.Linear(5, 10), nn.GELU(), nn.Linear(10, WIDTH))

    def kernel(self, t: int, like: Tensor) -> Tensor:
        time = torch.linspace(0, 1, t).to(like)[:, None]
        bands = torch.arange(1, 3).to(like) * math.pi
        features = torch.cat([time, torch.sin(time * bands), torch.cos(time * bands)], -1)
        return (self.filter(features) * torch.exp(-3 * time)).T

    def forward(self, x: Tensor) -> Tensor:
        t = x.size(1)
        q, k, v = self.proj(x).transpose(1, 2).chunk(3, 1)
        u = k * v
        y = torch.fft.irfft(torch.fft.rfft(u, n=2 * t) * torch.fft.rfft(self.kernel(t, u), n=2 * t), n=2 * t)[
            ..., :t
        ]
        return self.out((q * (y + u * self.bias[:, None])).transpose(1, 2))


def long_convolutions_by_fft() -> Job:
    return job_of(lambda: Stack(LongConvolution), next_token, TEXT)


class LogSpace(nn.Module):
    """A minimal GRU as a scan in logarithms (Heinsen)."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_and_gate, self.out = nn.Linear(WIDTH, 2 * 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden, gate = self.hidden_and_gate(x).chunk(2, dim=-1)
        log_coefficients = -F.softplus(gate)
        log_g = torch.where(hidden >= 0, (F.relu(hidden) + 0.5).log(), -F.softplus(-hidden))
        log_values = -F.softplus(-gate) + log_g
        star = F.pad(log_coefficients.cumsum(dim=1), (0, 0, 1, 0))
        start = torch.full_like(log_values[:, :1], math.log(0.5))
        values = torch.cat((start, log_values), 1)
        return self.out((star + (values - star).logcumsumexp(dim=1)).exp()[:, 1:])


def recurrence_in_logarithms() -> Job:
    return job_of(lambda: Stack(LogSpace), next_token, TEXT)


class MatrixMemory(nn.Module):
    """xLSTM's matrix memory in parallel form, stabilised by a running maximum; one layer forwards, one backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gates = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 4)
        self.out, self.skip = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 2, 6).permute(2, 0, 3, 1, 4)
        i, f = self.gates(x).transpose(1, 2).unsqueeze(-1).chunk(2, 1)
        forget = F.pad(F.logsigmoid(f).cumsum(-2), (0, 0, 1, 0))
        log_d = forget[:, :, 1:] - forget[:, :, 1:].transpose(-1, -2) + i.transpose(-1, -2)
        log_d = log_d.masked_fill(~torch.ones(t, t, dtype=torch.bool).tril(), -float("inf"))
        top = log_d.max(dim=-1, keepdim=True).values
        c = (q @ k.transpose(-1, -2)) / math.sqrt(6) * torch.exp(log_d - top)
        c = c / torch.maximum(c.sum(-1, keepdim=True).abs(), torch.exp(-top))
        return self.out((c @ v).transpose(1, 2).reshape(b, t, WIDTH) + self.skip * x)


def matrix_memories() -> Job:
    return job_of(lambda: Stack(MatrixMemory), next_token, TEXT)


class Capacity(nn.Module):
    """Two experts of four for each token; who comes after an expert is full is dropped; losses of balance and of logits are kept for the end."""

    def __init__(self, experts: int = 4, factor: float = 0.75) -> None:
        super().__init__()
        self.router, self.factor = nn.Linear(WIDTH, experts, bias=False), factor
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 18), nn.GELU(), nn.Linear(18, WIDTH)) for _ in range(experts)]
        )
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        logits = self.router(flat)
        weights, chosen = logits.softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        n, capacity = len(self.experts), max(1, int(self.factor * 2 * len(flat) / len(self.experts)))
        onehot = F.one_hot(chosen, n).to(x.dtype)
        place = (onehot.transpose(0, 1).flatten(0, 1).cumsum(0) - 1).view(2, -1, n).transpose(0, 1)
        place = (place * onehot).sum(-1).long()
        keep = place < capacity
        slots = F.one_hot(place.clamp(max=capacity - 1), capacity).to(x.dtype) * keep.unsqueeze(-1)
        combine = torch.einsum("tk,tkn,tkc->tnc", weights, onehot, slots)
        sent = torch.einsum("tnc,td->ncd", (combine > 0).to(x.dtype), flat)
        returned = torch.stack([expert(sent[i]) for i, expert in enumerate(self.experts)])
        balance = n * (onehot[:, 0].mean(0) * logits.softmax(-1).mean(0)).sum()
        self.losses = [balance, logits.logsumexp(-1).square().mean()]
        return torch.einsum("tnc,ncd->td", combine, returned).view_as(x)


def _with_balance(model: Any, b: Any) -> Tensor:
    loss = next_token(model, b)
    for module in model.modules():
        if isinstance(module, Capacity):
            balance, z = module.losses
            loss = loss + 1e-2 * balance + 1e-3 * z
    return loss


def experts_that_are_full() -> Job:
    return job_of(lambda: Stack(Capacity), _with_balance, TEXT)


class ExpertChoice(nn.Module):
    """Experts choose their tokens; a shared expert takes all; a bias that balances is moved without a gradient."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(experts, WIDTH) * 0.5)
        self.w1, self.w2 = (
            nn.Parameter(torch.randn(experts, WIDTH, 14) * 0.3),
            nn.Parameter(torch.randn(experts, 14, WIDTH) * 0.3),
        )
        self.shared = nn.Sequential(nn.Linear(WIDTH, 10), nn.SiLU(), nn.Linear(10, WIDTH))
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        scores = torch.sigmoid(flat @ self.gate.T)
        _, index = torch.topk((scores + self.bias).T, k=max(1, len(flat) // 3), dim=-1)
        h = torch.bmm(F.silu(torch.bmm(flat[index], self.w1)), self.w2) * scores.T.gather(1, index).unsqueeze(
            -1
        )
        out = torch.zeros_like(flat).index_add(0, index.flatten(), h.flatten(0, 1))
        if self.training:
            with torch.no_grad():
                load = scores.detach().mean(0)
                self.bias += 0.01 * torch.sign(load.mean() - load)
        return (out + self.shared(flat)).view_as(x)


def experts_that_choose() -> Job:
    return job_of(lambda: Stack(ExpertChoice), next_token, TEXT)


class MixtureOfDepths(nn.Module):
    """Half of each text's tokens go through the block, the others past it."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.attn = nn.Linear(WIDTH, 1), nn.MultiheadAttention(WIDTH, 3, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 20), nn.ReLU(), nn.Linear(20, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.router(x).squeeze(-1)
        index = weight.topk(x.size(1) // 2, dim=1).indices.sort(dim=1).values
        rows = index.unsqueeze(-1).expand(-1, -1, x.size(-1))
        chosen = x.gather(1, rows)
        mask = index.unsqueeze(1) > index.unsqueeze(2)
        h = (
            chosen
            + self.attn(chosen, chosen, chosen, attn_mask=mask.repeat_interleave(3, 0), need_weights=False)[0]
        )
        h = self.mlp(h) * torch.sigmoid(weight.gather(1, index)).unsqueeze(-1)
        return torch.zeros_like(x).scatter_add(1, rows, h)


def mixture_of_depths() -> Job:
    return job_of(lambda: Stack(MixtureOfDepths), next_token, TEXT)


class Streaming(nn.Module):
    """A GRU that keeps its state in an attribute and looks ahead by chunks of three frames."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gru, self.head = nn.Conv1d(5, 9, 3), nn.GRU(9, 9, batch_first=True), nn.Linear(9, 1)
        self.state: Tensor | None = None
        self.left: Tensor | None = None

    def reset(self) -> None:
        self.state = self.left = None

    def chunk(self, x: Tensor) -> Tensor:
        left = x.new_zeros(x.size(0), 2, x.size(2)) if self.left is None else self.left
        x = torch.cat([left, x], 1)
        self.left = x[:, -2:]
        h = F.elu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        h, self.state = self.gru(h, self.state)
        return self.head(h).squeeze(-1)

    def forward(self, x: Tensor) -> Tensor:
        self.reset()
        return torch.cat([self.chunk(part) for part in x.split(3, dim=1)], 1)


def streaming_by_chunks() -> Job:
    return job_of(Streaming, lambda m, b: F.smooth_l1_loss(m(b["x"]), b["y"]), SERIES)
