"""Time series: causal convolutions, spectra, attention to few queries, states that are solved between observations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import weight_norm

from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal

PAST, FUTURE, VARIABLES = 12, 4, 3
SERIES = {
    "past": normal(111, PAST, VARIABLES), "future": normal(112, FUTURE, VARIABLES),
    "mask": integers(113, 2, PAST, VARIABLES).float(), "length": integers(114, PAST + 1, least=3),
}  # fmt: skip


def _forecast(model: Any, b: Any) -> Tensor:
    return F.mse_loss(model(b["past"]), b["future"])


class Chomp1d(nn.Module):
    def __init__(self, chomp_size: int) -> None:
        super().__init__()
        self.chomp_size = chomp_size

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, : -self.chomp_size].contiguous()


class TemporalBlock(nn.Module):
    def __init__(self, n_in: int, n_out: int, dilation: int) -> None:
        super().__init__()
        self.conv1 = weight_norm(nn.Conv1d(n_in, n_out, 2, padding=dilation, dilation=dilation))
        self.conv2 = weight_norm(nn.Conv1d(n_out, n_out, 2, padding=dilation, dilation=dilation))
        self.chomp, self.relu, self.dropout = Chomp1d(dilation), nn.ReLU(), nn.Dropout(0.2)
        self.net = nn.Sequential(
            self.conv1, self.chomp, self.relu, self.dropout, self.conv2, self.chomp, self.relu, self.dropout
        )
        self.downsample = nn.Conv1d(n_in, n_out, 1) if n_in != n_out else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


class TCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(TemporalBlock(VARIABLES, 7, 1), TemporalBlock(7, 7, 2))
        self.head = nn.Linear(7, FUTURE * VARIABLES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x.transpose(1, 2))[:, :, -1]).view(-1, FUTURE, VARIABLES)


def tcn_with_weight_norm() -> Job:
    return job_of(TCN, _forecast, SERIES)


class NBeats(nn.Module):
    """Stacks of blocks that take their backcast out of the residual; polynomials and waves as bases."""

    def __init__(self) -> None:
        super().__init__()
        self.fcs = nn.ModuleList([nn.Sequential(nn.Linear(PAST, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU()) for _ in range(2)])  # fmt: skip
        self.thetas = nn.ModuleList([nn.Linear(9, 6) for _ in range(2)])
        t = torch.arange(PAST + FUTURE) / (PAST + FUTURE)
        self.trend = nn.Parameter(torch.stack([t**i for i in range(3)]), requires_grad=False)
        self.waves = nn.Parameter(
            torch.stack([torch.cos(2 * math.pi * i * t) for i in range(3)]), requires_grad=False
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 1)
        forecast: Any = torch.zeros(*x.shape[:2], FUTURE, dtype=x.dtype)
        for fc, theta, basis in zip(self.fcs, self.thetas, (self.trend, self.waves), strict=True):
            b, f = theta(fc(x)).split(3, -1)
            x = x - torch.einsum("bvp,pt->bvt", b, basis[:, :PAST])
            forecast = forecast + torch.einsum("bvp,pt->bvt", f, basis[:, PAST:])
        return forecast.permute(0, 2, 1)


def n_beats() -> Job:
    return job_of(NBeats, _forecast, SERIES)


class ProbAttention(nn.Module):
    """Attention of those queries alone that are far from uniform, judged by sampled keys."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.q, self.k, self.v, self.out = heads, *[nn.Linear(width, width) for _ in range(4)]

    def forward(self, x: Tensor) -> Tensor:
        B, L, D = x.shape  # noqa: N806
        H = self.heads  # noqa: N806
        q, k, v = (f(x).view(B, L, H, -1).transpose(2, 1) for f in (self.q, self.k, self.v))
        u = 4
        index = torch.randint(L, (L, u))
        sampled = k.unsqueeze(-3).expand(B, H, L, L, D // H)[:, :, torch.arange(L).unsqueeze(1), index, :]
        scores = torch.matmul(q.unsqueeze(-2), sampled.transpose(-2, -1)).squeeze(-2)
        M = scores.max(-1)[0] - torch.div(scores.sum(-1), L)  # noqa: N806
        top = M.topk(u, sorted=False)[1]
        reduced = q[torch.arange(B)[:, None, None], torch.arange(H)[None, :, None], top, :]
        attn = torch.softmax(torch.matmul(reduced, k.transpose(-2, -1)) / math.sqrt(D // H), dim=-1)
        context = v.mean(dim=-2).unsqueeze(-2).expand(B, H, L, D // H).clone()
        context[torch.arange(B)[:, None, None], torch.arange(H)[None, :, None], top, :] = torch.matmul(
            attn, v
        )
        return x + self.out(context.transpose(2, 1).reshape(B, L, D))


class Informer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv1d(VARIABLES, 8, 3, padding=1, padding_mode="circular", bias=False)
        self.one, self.two, self.distil = ProbAttention(), ProbAttention(), nn.MaxPool1d(3, 2, 1)
        self.head = nn.Linear(8, FUTURE * VARIABLES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(self.embed(x.permute(0, 2, 1)).transpose(1, 2))
        x = self.two(self.distil(F.elu(x.transpose(1, 2))).transpose(1, 2))
        return self.head(x.mean(1)).view(-1, FUTURE, VARIABLES)


def informer() -> Job:
    return job_of(Informer, _forecast, SERIES)


class AutoCorrelation(nn.Module):
    """Delays found by the FFT, series rolled by them, then a moving average taken out."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.avg = nn.AvgPool1d(5, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).transpose(1, 2) for f in (self.q, self.k, self.v))
        corr = torch.fft.irfft(torch.fft.rfft(q, dim=-1) * torch.conj(torch.fft.rfft(k, dim=-1)), dim=-1, n=x.size(1))  # fmt: skip
        mean = torch.mean(corr, dim=1)
        index = torch.topk(torch.mean(mean, dim=0), 3, dim=-1)[1]
        weights = torch.softmax(torch.stack([mean[:, index[i]] for i in range(3)], dim=-1), dim=-1)
        out = torch.zeros_like(v)
        for i in range(3):
            out = out + torch.roll(v, -int(index[i]), -1) * weights[:, i].view(-1, 1, 1)
        x = x + out.transpose(1, 2)
        front, end = x[:, 0:1, :].repeat(1, 2, 1), x[:, -1:, :].repeat(1, 2, 1)
        return x - self.avg(torch.cat([front, x, end], dim=1).permute(0, 2, 1)).permute(0, 2, 1)


class Autoformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.one, self.two = nn.Linear(VARIABLES, 6), AutoCorrelation(), AutoCorrelation()
        self.head = nn.Linear(6, VARIABLES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(self.embed(x)))[:, -FUTURE:])


def autoformer() -> Job:
    return job_of(Autoformer, _forecast, SERIES)


class RevIN(nn.Module):
    """Statistics of each window are left in attributes, and put back at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.affine_weight, self.affine_bias = (
            nn.Parameter(torch.ones(VARIABLES)),
            nn.Parameter(torch.zeros(VARIABLES)),
        )
        self.one, self.two = nn.Linear(PAST, 9), nn.Linear(9, FUTURE)

    def _statistics(self, x: Tensor) -> None:
        self.mean = torch.mean(x, dim=1, keepdim=True).detach()
        self.stdev = torch.sqrt(torch.var(x, dim=1, keepdim=True, unbiased=False) + 1e-5).detach()

    def forward(self, x: Tensor) -> Tensor:
        self._statistics(x)
        x = (x - self.mean) / self.stdev * self.affine_weight + self.affine_bias
        y = self.two(torch.tanh(self.one(x.transpose(1, 2)))).transpose(1, 2)
        return (y - self.affine_bias) / (self.affine_weight + 1e-10) * self.stdev + self.mean


def reversible_normalisation() -> Job:
    return job_of(RevIN, _forecast, SERIES)


class DeepAR(nn.Module):
    """Draws its own next input, from a normal whose parameters it says."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.mu, self.sigma = (
            nn.LSTMCell(VARIABLES, 9),
            nn.Linear(9, VARIABLES),
            nn.Linear(9, VARIABLES),
        )

    def forward(self, past: Tensor, future: Tensor) -> Tensor:
        h = c = torch.zeros(past.size(0), 9, dtype=past.dtype)
        for t in range(past.size(1)):
            h, c = self.lstm(past[:, t], (h, c))
        losses = []
        for t in range(future.size(1)):
            dist = torch.distributions.Normal(self.mu(h), F.softplus(self.sigma(h)) + 1e-4)
            losses.append(-dist.log_prob(future[:, t]).mean(-1))
            x = dist.sample() if t % 2 else future[:, t]
            h, c = self.lstm(x, (h, c))
        return torch.stack(losses, 1).mean()


def deep_ar() -> Job:
    return job_of(DeepAR, lambda m, b: m(b["past"], b["future"]), SERIES)


class GRUD(nn.Module):
    """Missing values decay towards the mean, loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.decay_x, self.decay_h = nn.Parameter(torch.rand(VARIABLES)), nn.Linear(VARIABLES, 7)
        self.cell, self.head = nn.GRUCell(2 * VARIABLES, 7), nn.Linear(7, FUTURE * VARIABLES)
        self.register_buffer("mean", torch.zeros(VARIABLES))
        self.mean: Tensor

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h, last = x.new_zeros(x.size(0), 7), x.new_zeros(x.size(0), VARIABLES)
        delta = torch.zeros_like(last)
        for t in range(x.size(1)):
            m = mask[:, t]
            delta = torch.where(m > 0, torch.ones_like(delta), delta + 1)
            last = torch.where(m > 0, x[:, t], last)
            gamma = torch.exp(-torch.relu(self.decay_x * delta))
            h = h * torch.exp(-torch.relu(self.decay_h(delta)))
            filled = m * x[:, t] + (1 - m) * (gamma * last + (1 - gamma) * self.mean)
            h = self.cell(torch.cat([filled, m], 1), h)
        return self.head(h).view(-1, FUTURE, VARIABLES)


def gru_with_decay() -> Job:
    return job_of(GRUD, lambda m, b: F.mse_loss(m(b["past"], b["mask"]), b["future"]), SERIES)


def _soft_dtw(model: Any, b: Any, gamma: float = 0.5) -> Tensor:
    """Soft dynamic time warping, its table filled cell by cell, in place."""
    y, wanted = model(b["past"]), b["future"]
    D = ((y.unsqueeze(2) - wanted.unsqueeze(1)) ** 2).sum(-1)  # noqa: N806
    n, m = D.shape[1:]
    R = torch.full((D.size(0), n + 1, m + 1), 1e8, dtype=D.dtype)  # noqa: N806
    R[:, 0, 0] = 0
    for i in range(1, n + 1):
        for j in range(1, m + 1):
            before = torch.stack([R[:, i - 1, j - 1], R[:, i - 1, j], R[:, i, j - 1]], 0) / -gamma
            R[:, i, j] = D[:, i - 1, j - 1] - gamma * torch.logsumexp(before, 0)
    return R[:, n, m].mean()


def soft_dtw() -> Job:
    return job_of(TCN, _soft_dtw, SERIES)


def _pinball(model: Any, b: Any) -> Tensor:
    y, losses = model(b["past"]), []
    for i, q in enumerate((0.1, 0.5, 0.9)):
        errors = b["future"].mean(-1) - y[:, :, i]
        losses.append(torch.max((q - 1) * errors, q * errors).unsqueeze(1))
    return torch.mean(torch.sum(torch.cat(losses, dim=1), dim=1))


class GatedResidual(nn.Module):
    """The temporal fusion transformer's variable selection over an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embeds = nn.ModuleList([nn.Linear(1, 6) for _ in range(VARIABLES)])
        self.select, self.lstm = (
            nn.Linear(6 * VARIABLES, VARIABLES),
            nn.LSTM(6, 6, batch_first=True, num_layers=2),
        )
        self.gate, self.norm, self.head = nn.Linear(6, 12), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        each = torch.stack([e(x[..., i : i + 1]) for i, e in enumerate(self.embeds)], dim=-1)
        weights = torch.softmax(self.select(each.flatten(2)), -1).unsqueeze(2)
        x = (each * weights).sum(-1)
        out, (h, _) = self.lstm(x)
        return self.head(self.norm(x + F.glu(self.gate(out + h[-1].unsqueeze(1)), -1)))[:, -FUTURE:]


def quantiles_of_fusion() -> Job:
    return job_of(GatedResidual, _pinball, SERIES)


class Reservoir(nn.Module):
    """A recurrent matrix that is never trained, scaled by its largest eigenvalue."""

    def __init__(self) -> None:
        super().__init__()
        w = torch.rand(11, 11) - 0.5
        w *= 0.9 / torch.linalg.eigvals(w).abs().max().item()
        self.register_buffer("w", w)
        self.w: Tensor
        self.inp, self.out = nn.Linear(VARIABLES, 11, bias=False), nn.Linear(11, FUTURE * VARIABLES)
        self.inp.weight.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 11).to(x)
        for i in range(x.shape[1]):
            h = 0.3 * h + 0.7 * torch.tanh(self.inp(x[:, i]) + h @ self.w.T)
        return self.out(h).reshape(-1, FUTURE, VARIABLES)


def echo_state() -> Job:
    return job_of(Reservoir, _forecast, SERIES)


class LastState(nn.Module):
    """An RNN cell by hand, stopped at each sample's length."""

    def __init__(self) -> None:
        super().__init__()
        self.x2h, self.h2h, self.head = (
            nn.Linear(VARIABLES, 9),
            nn.Linear(9, 9),
            nn.Linear(9, FUTURE * VARIABLES),
        )

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        h, states = torch.zeros(x.size(0), 9, dtype=x.dtype), []
        for t in range(int(length.max())):
            h = torch.tanh(self.x2h(x[:, t]) + self.h2h(h))
            states.append(h)
        states = torch.stack(states, 1)
        last = states[torch.arange(x.size(0)), length - 1]
        return self.head(last).view(-1, FUTURE, VARIABLES)


def last_state_of_lengths() -> Job:
    return job_of(LastState, lambda m, b: F.mse_loss(m(b["past"], b["length"]), b["future"]), SERIES)
