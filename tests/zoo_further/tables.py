"""Tables and series: features as tokens, trees that are soft, numbers in bins, periods that the data choose, hazards and forecasts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal, uniform

ROWS = {"num": normal(581, 5), "cat": integers(582, 4, 3), "y": integers(583, 3)}
SERIES = {"past": normal(584, 12, 3), "future": normal(585, 4, 3)}
SURVIVAL = {
    "x": normal(586, 6),
    "time": uniform(587) * 9 + 0.5,
    "event": uniform(588) < 0.7,
    "bin": integers(589, 5),
}


def classify(model: Any, b: Any) -> Tensor:
    return F.cross_entropy(model(b["num"], b["cat"]), b["y"])


class Tokens(nn.Module):
    """A token for each feature: numbers times vectors, categories with offsets in one table, a class token."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(5, width) * 0.5),
            nn.Parameter(torch.zeros(5, width)),
        )
        self.table, self.cls = nn.Embedding(12, width), nn.Parameter(torch.randn(width) * 0.5)
        self.register_buffer("offsets", torch.tensor([0, 4, 8]))

    def forward(self, num: Tensor, cat: Tensor) -> Tensor:
        tokens = self.weight[None] * num[..., None] + self.bias
        return torch.cat([self.cls.expand(len(num), 1, -1), tokens, self.table(cat + self.offsets)], 1)


class Rows(nn.Module):
    """Attention over features, then over the rows of the batch (SAINT)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = Tokens()
        self.columns = nn.ModuleList(
            [nn.TransformerEncoderLayer(8, 2, 11, 0.0, batch_first=True, norm_first=True) for _ in range(2)]
        )
        self.rows = nn.ModuleList([nn.MultiheadAttention(9 * 8, 4, batch_first=True) for _ in range(2)])
        self.norms, self.head = nn.ModuleList([nn.LayerNorm(72) for _ in range(2)]), nn.Linear(8, 3)

    def forward(self, num: Tensor, cat: Tensor) -> Tensor:
        x = self.tokens(num, cat)
        for column, row, norm in zip(self.columns, self.rows, self.norms, strict=True):
            x = column(x)
            flat = norm(x.flatten(1)).unsqueeze(0)
            x = x + row(flat, flat, flat, need_weights=False)[0].view_as(x)
        return self.head(F.relu(x[:, 0]))


def attention_over_rows_and_columns() -> Job:
    return job_of(Rows, classify, ROWS)


class Trees(nn.Module):
    """Oblivious trees: features by sparse weights, thresholds by a soft step, leaves by products; layers see those before (NODE)."""

    def __init__(self, inputs: int, trees: int = 5, depth: int = 3, outputs: int = 3) -> None:
        super().__init__()
        self.select, self.threshold = (
            nn.Parameter(torch.rand(inputs, trees, depth)),
            nn.Parameter(torch.randn(trees, depth)),
        )
        self.log_temperature, self.response = (
            nn.Parameter(torch.zeros(trees, depth)),
            nn.Parameter(torch.randn(trees, outputs, 2**depth)),
        )
        codes = torch.arange(2**depth)[None] // 2 ** torch.arange(depth)[:, None] % 2
        self.register_buffer("codes", torch.stack([codes, 1 - codes], -1).float(), persistent=False)

    @staticmethod
    def entmax(x: Tensor) -> Tensor:
        """1.5-entmax over the first dim, by sorting."""
        x = (x - x.max(0, keepdim=True).values) / 2
        ordered = x.sort(0, descending=True).values
        rho = torch.arange(1, len(x) + 1).to(x).view(-1, *[1] * (x.dim() - 1))
        mean, square = ordered.cumsum(0) / rho, (ordered**2).cumsum(0) / rho
        delta = (1 - rho * (square - mean**2)) / rho
        tau = mean - delta.clamp(min=0).sqrt()
        support = (tau <= ordered).sum(0, keepdim=True)
        return (x - tau.gather(0, support - 1)).clamp(min=0) ** 2

    def forward(self, x: Tensor) -> Tensor:
        values = torch.einsum("bi,itd->btd", x, self.entmax(self.select))
        logits = (values - self.threshold) * torch.exp(-self.log_temperature)
        bins = torch.stack([-logits, logits], -1)
        bins = (0.5 * bins + 0.5).clamp(0, 1)
        matches = torch.einsum("btds,dcs->btdc", bins, self.codes.to(x))
        return torch.einsum("btc,toc->bto", matches.prod(2), self.response)


class Forest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.layers = nn.ModuleList([Trees(11), Trees(11 + 15)])

    def forward(self, num: Tensor, cat: Tensor) -> Tensor:
        x, outs = torch.cat([num, self.embed(cat).flatten(1)], -1), []
        for layer in self.layers:
            outs.append(layer(x))
            x = torch.cat([x, outs[-1].flatten(1)], -1)
        return torch.cat(outs, 1).mean(1)


def soft_oblivious_trees() -> Job:
    return job_of(Forest, classify, ROWS)


class Binned(nn.Module):
    """Numbers encoded piecewise linearly by edges kept in buffers, and periodically; pairs as a factorisation machine has them; additive nets."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.linspace(-2, 2, 7).repeat(5, 1))
        self.frequency, self.linear = (
            nn.Parameter(torch.randn(5, 4)),
            nn.Parameter(torch.randn(5, 14, 8) * 0.2),
        )
        self.bias, self.table = (
            nn.Parameter(torch.zeros(5, 8)),
            nn.ModuleList([nn.Embedding(4, 8) for _ in range(3)]),
        )
        self.additive = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)) for _ in range(8)]
        )
        self.pairs = nn.Linear(8, 3)

    def forward(self, num: Tensor, cat: Tensor) -> Tensor:
        left, width = self.edges[:, :-1].to(num), self.edges.diff(dim=1).to(num)
        pieces = (num[..., None] - left) / width
        pieces = torch.cat(
            [pieces[..., :1].clamp(max=1), pieces[..., 1:-1].clamp(0, 1), pieces[..., -1:].clamp(min=0)], -1
        )
        waves = 2 * math.pi * self.frequency * num[..., None]
        h = torch.cat([pieces, waves.sin(), waves.cos()], -1)
        h = F.relu((h[..., None, :] @ self.linear).squeeze(-2) + self.bias)
        h = torch.cat([h, torch.stack([t(c) for t, c in zip(self.table, cat.unbind(1), strict=True)], 1)], 1)
        pairs = 0.5 * (h.sum(1) ** 2 - (h**2).sum(1))
        return self.pairs(pairs) + sum(net(h[:, i]) for i, net in enumerate(self.additive))


def numbers_in_bins_and_waves() -> Job:
    return job_of(Binned, classify, ROWS)


class Periods(nn.Module):
    """Folds a series by the periods that its spectrum shows (TimesNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.extend = nn.Conv1d(3, 8, 3, padding=1, padding_mode="circular"), nn.Linear(12, 16)
        self.convs = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(8, 10, 3, padding=1), nn.GELU(), nn.Conv2d(10, 8, 1)) for _ in range(2)]
        )
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def fold(self, x: Tensor, conv: nn.Module) -> Tensor:
        spectrum = torch.fft.rfft(x, dim=1)
        strength = abs(spectrum).mean(0).mean(-1)
        strength[0] = 0
        _, top = torch.topk(strength, 2)
        periods = x.shape[1] // top.detach().cpu().numpy()
        weights, outs, length = abs(spectrum).mean(-1)[:, top], [], x.size(1)
        for period in periods:
            rest = -length % int(period)
            h = torch.cat([x, x.new_zeros(len(x), rest, x.size(2))], 1) if rest else x
            h = h.reshape(len(x), h.size(1) // int(period), int(period), -1).permute(0, 3, 1, 2)
            outs.append(conv(h).permute(0, 2, 3, 1).reshape(len(x), length + rest, -1)[:, :length])
        return x + (torch.stack(outs, -1) * weights.softmax(1)[:, None, None]).sum(-1)

    def forward(self, past: Tensor) -> Tensor:
        mean = past.mean(1, keepdim=True).detach()
        std = (past.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt().detach()
        x = self.extend(self.embed(((past - mean) / std).transpose(1, 2))).transpose(1, 2)
        for conv in self.convs:
            x = self.norm(self.fold(x, conv))
        return (self.head(x) * std + mean)[:, -4:]


def periods_that_the_spectrum_shows() -> Job:
    return job_of(Periods, lambda m, b: F.mse_loss(m(b["past"]), b["future"]), SERIES)


class Hierarchical(nn.Module):
    """Pools at several rates, forecasts few knots and interpolates them, subtracts what is explained (N-HiTS); trends apart from seasons."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(12 // k, 13), nn.ReLU(), nn.Linear(13, 12 // k + max(4 // k, 1)))
                for k in (4, 2, 1)
            ]
        )
        self.trend, self.season = nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, past: Tensor) -> Tensor:
        x = past.transpose(1, 2)
        moving = F.avg_pool1d(
            torch.cat([x[..., :1].repeat(1, 1, 2), x, x[..., -1:].repeat(1, 1, 2)], -1), 5, 1
        )
        forecast = self.trend(moving) + self.season(x - moving)
        for k, block in zip((4, 2, 1), self.blocks, strict=True):
            theta = block(F.max_pool1d(x, k, k))
            back, front = theta[..., : 12 // k], theta[..., 12 // k :]
            x = x - F.interpolate(back, size=12, mode="linear")
            forecast = forecast + F.interpolate(front, size=4, mode="linear", align_corners=False)
        return forecast.transpose(1, 2)


def _scaled(model: Any, b: Any) -> Tensor:
    scale = (b["past"][:, 1:] - b["past"][:, :-1]).abs().mean(1, keepdim=True).clamp(min=1e-3)
    return ((model(b["past"]) - b["future"]).abs() / scale).mean()


def knots_at_several_rates() -> Job:
    return job_of(Hierarchical, _scaled, SERIES)


class Modes(nn.Module):
    """Attention among a few frequencies that are drawn when it is built; complex weights as two real ones (FEDformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.out, self.head = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        generator = torch.Generator().manual_seed(2)
        self.index = sorted(torch.randperm(7, generator=generator)[:4].tolist())
        self.w1, self.w2 = (nn.Parameter(torch.randn(2, 2, 4, 4, 4) * 0.3) for _ in range(2))

    def block(self, x: Tensor, real: Tensor, imaginary: Tensor) -> Tensor:
        b, t, _ = x.shape
        spectrum = torch.fft.rfft(x.view(b, t, 2, 4).permute(0, 2, 3, 1), dim=-1)
        out = torch.zeros(
            b, 2, 4, t // 2 + 1, dtype=torch.cfloat if x.dtype == torch.float32 else torch.cdouble
        )
        for place, mode in enumerate(self.index):
            out[..., mode] = torch.einsum(
                "bhi,hio->bho", spectrum[..., mode], torch.complex(real, imaginary)[..., place]
            )
        return torch.fft.irfft(out, n=t).permute(0, 3, 1, 2).flatten(2)

    def forward(self, past: Tensor) -> Tensor:
        x = self.proj(past)
        x = x + torch.tanh(self.out(self.block(x, self.w1[0], self.w1[1])))
        x = x + self.block(x, *self.w2)
        return self.head(x)[:, -4:]


def chosen_frequencies() -> Job:
    return job_of(Modes, lambda m, b: F.mse_loss(m(b["past"]), b["future"]), SERIES)


class Causal(nn.Module):
    """Dilated causal convolutions with weight norm, a gate of channels by series, quantiles that cannot cross, CRPS of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Conv1d(3, 8, 1)
        self.convs = nn.ModuleList(
            [nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 16, 2, dilation=2**i)) for i in range(3)]
        )
        self.skip, self.head = nn.ModuleList([nn.Conv1d(8, 8, 1) for _ in range(3)]), nn.Conv1d(8, 9, 1)

    def forward(self, past: Tensor) -> Tensor:
        x, total = self.inp(past.transpose(1, 2)), 0
        for i, (conv, skip) in enumerate(zip(self.convs, self.skip, strict=True)):
            a, g = conv(F.pad(x, (2**i, 0))).chunk(2, 1)
            h = torch.tanh(a) * torch.sigmoid(g)
            total = total + skip(h)
            x = (x + h) * math.sqrt(0.5)
        out = self.head(F.relu(total))[..., -4:].unflatten(1, (3, 3))
        first, rest = out[:, :, :1], F.softplus(out[:, :, 1:])
        return torch.cat([first, first + rest.cumsum(2)], 2).permute(0, 3, 1, 2)


def _pinball(model: Any, b: Any) -> Tensor:
    quantiles = model(b["past"])
    error = b["future"].unsqueeze(-1) - quantiles
    levels = torch.tensor([0.1, 0.5, 0.9]).to(error)
    spread = (quantiles.unsqueeze(-1) - quantiles.unsqueeze(-2)).abs().mean()
    return torch.maximum(levels * error, (levels - 1) * error).sum(-1).mean() + 0.1 * (
        error.abs().mean() - 0.5 * spread
    )


def quantiles_that_do_not_cross() -> Job:
    return job_of(Causal, _pinball, SERIES)


class Risk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.risk, self.bins = (
            nn.Sequential(nn.Linear(6, 11), nn.SELU(), nn.AlphaDropout(0.1), nn.Linear(11, 9), nn.SELU()),
            nn.Linear(9, 1, bias=False),
            nn.Linear(9, 5),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.risk(h).squeeze(-1), self.bins(h)


def _survival(model: Any, b: Any) -> Tensor:
    """Cox's partial likelihood over those still at risk in the batch, a likelihood of bins, a ranking of pairs (DeepSurv, DeepHit)."""
    risk, logits = model(b["x"])
    order = b["time"].argsort(descending=True)
    at_risk = torch.logcumsumexp(risk[order], 0)
    event = b["event"][order].to(risk)
    cox = -((risk[order] - at_risk) * event).sum() / event.sum().clamp(min=1)
    p = logits.softmax(-1)
    cdf = p.cumsum(-1)
    seen = torch.log(p.gather(1, b["bin"][:, None]).squeeze(1) + 1e-7)
    censored = torch.log(1 - cdf.gather(1, b["bin"][:, None]).squeeze(1) + 1e-6)
    likelihood = -torch.where(b["event"], seen, censored).mean()
    first = (b["bin"][:, None] < b["bin"][None]) & b["event"][:, None]
    at = cdf[:, b["bin"]].T
    ranking = (torch.exp((at - at.diagonal()[:, None]) / 0.5) * first).sum() / first.sum().clamp(min=1)
    return cox + likelihood + 0.2 * ranking


def hazards_of_those_at_risk() -> Job:
    return job_of(Risk, _survival, SURVIVAL)
