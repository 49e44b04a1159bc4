"""Flows, diffusion and codes: splines with masks, series of traces, preconditioned noise, codebooks."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
from torch import Tensor, autograd, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from meshloom.core.job import Job
from tests.zoo import job_of, normal
from tests.zoo_outside.adversaries import IMAGES, POINTS


def _rational_quadratic(
    x: Tensor, w: Tensor, h: Tensor, d: Tensor, bound: float = 3.0
) -> tuple[Tensor, Tensor]:
    inside = (x >= -bound) & (x <= bound)
    out, logdet = torch.zeros_like(x), torch.zeros_like(x)
    d = F.pad(d, pad=(1, 1))
    constant = np.log(np.exp(1 - 1e-3) - 1)
    d[..., 0] = constant
    d[..., -1] = constant
    out[~inside], logdet[~inside] = x[~inside], 0
    x, w, h, d = x[inside], w[inside, :], h[inside, :], d[inside, :]
    knots = []
    for each in (w, h):
        each = 1e-3 + (1 - 1e-3 * each.shape[-1]) * F.softmax(each, dim=-1)
        cum = F.pad(torch.cumsum(each, dim=-1), pad=(1, 0), mode="constant", value=0.0) * 2 * bound - bound
        cum[..., 0], cum[..., -1] = -bound, bound
        knots.append((cum, cum[..., 1:] - cum[..., :-1]))
    (cw, w), (ch, h) = knots
    d = 1e-3 + F.softplus(d)
    locations = cw.clone().detach()
    locations[..., -1] += 1e-6
    index = (torch.sum(x[..., None] >= locations, dim=-1) - 1)[..., None]
    pick = lambda each: each.gather(-1, index)[..., 0]  # noqa: E731
    in_cw, in_w, in_ch, in_h, delta = pick(cw), pick(w), pick(ch), pick(h), pick(h / w)
    d0, d1 = pick(d), pick(d[..., 1:])
    theta = (x - in_cw) / in_w
    t1 = theta * (1 - theta)
    denominator = delta + (d0 + d1 - 2 * delta) * t1
    out[inside] = in_ch + in_h * (delta * theta.pow(2) + d0 * t1) / denominator
    numerator = delta.pow(2) * (d1 * theta.pow(2) + 2 * delta * t1 + d0 * (1 - theta).pow(2))
    logdet[inside] = torch.log(numerator) - 2 * torch.log(denominator)
    return out, logdet


class SplineFlow(nn.Module):
    """Neural splines: what is outside of the bounds is picked out by masks."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            [nn.Sequential(nn.Linear(3, 13), nn.Tanh(), nn.Linear(13, 3 * 14)) for _ in range(2)]
        )

    def forward(self, x: Tensor) -> Tensor:
        logdet = x.new_zeros(x.shape[0])
        for net in self.nets:
            one, two = x[:, :3], x[:, 3:]
            w, h, d = torch.split(net(one).reshape(-1, 3, 14), [5, 5, 4], dim=2)
            two, ld = _rational_quadratic(two, w, h, d)
            logdet += ld.sum(1)
            x = torch.cat([two, one], dim=1)
        return (0.5 * (x**2).sum(1) + 3 * math.log(2 * math.pi) - logdet).mean()


def spline_flow() -> Job:
    return job_of(SplineFlow, lambda m, b: m(b["x"]), {"x": normal(344, 6) * 2})


class ResidualFlow(nn.Module):
    """The trace of the logarithm by a power series of products with vectors, its length drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(spectral_norm(nn.Linear(6, 13)), nn.ELU(), spectral_norm(nn.Linear(13, 6))) for _ in range(2)])  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        logdet = 0.0
        for g in self.blocks:
            with torch.enable_grad():
                x = x.requires_grad_(True)
                y = 0.8 * g(x)
                n = np.random.geometric(0.5) + 2
                v = torch.randn_like(x)
                w, series = v, 0.0
                for k in range(1, min(n, 5) + 1):
                    w = autograd.grad(y, x, w, retain_graph=True, create_graph=True)[0]
                    series = series + (-1) ** (k + 1) / k * (w * v).sum(1)
            logdet = logdet + series
            x = x + y
        return (0.5 * x.pow(2).sum(1) - logdet).mean()


def residual_flow() -> Job:
    return job_of(ResidualFlow, lambda m, b: m(b["x"]), POINTS)


class EDM(nn.Module):
    """Preconditioned by noise levels; labels dropped; an average of the network's weights that the forward keeps, and its decay
    warms up by a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.net = DenoiserNet()
        self.ema = copy.deepcopy(self.net).eval().requires_grad_(False)
        self.register_buffer("num_updates", torch.tensor(0, dtype=torch.int))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rnd = torch.randn([x.shape[0], 1, 1, 1], device=x.device, dtype=x.dtype)
        sigma = (rnd * 1.2 - 1.2).exp()
        weight = (sigma**2 + 0.25) / (sigma * 0.5) ** 2
        keep = (torch.rand(x.shape[0]) >= 0.2).to(x)
        noisy = x + torch.randn_like(x) * sigma
        c_skip, c_out = 0.25 / (sigma**2 + 0.25), sigma * 0.5 / (sigma**2 + 0.25).sqrt()
        c_in, c_noise = 1 / (0.25 + sigma**2).sqrt(), sigma.log() / 4
        d = c_skip * noisy + c_out * self.net(c_in * noisy, c_noise.flatten(), y, keep)
        if self.training:
            self._update()
        return (weight * (d - x) ** 2).mean()

    @torch.no_grad()
    def _update(self) -> None:
        self.num_updates += 1
        decay = min(0.999, (1 + self.num_updates.item()) / (10 + self.num_updates.item()))
        mine, theirs = dict(self.net.named_parameters()), dict(self.ema.named_parameters())
        for key in mine:
            theirs[key].sub_((1.0 - decay) * (theirs[key] - mine[key]))


class DenoiserNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.label, self.conv1 = (
            nn.Sequential(nn.Linear(6, 8), nn.SiLU()),
            nn.Embedding(4, 8),
            nn.Conv2d(3, 8, 3, padding=1),
        )
        self.norm, self.affine, self.conv2 = (
            nn.GroupNorm(2, 8),
            nn.Linear(8, 16),
            nn.Conv2d(8, 3, 3, padding=1),
        )
        self.register_buffer("freqs", torch.randn(3) * 2)

    def forward(self, x: Tensor, t: Tensor, y: Tensor, keep: Tensor) -> Tensor:
        angles = (2 * np.pi * t).ger(self.freqs.to(t.dtype))
        emb = self.emb(torch.cat([angles.cos(), angles.sin()], dim=1)) + self.label(y) * keep[:, None]
        scale, shift = self.affine(emb)[:, :, None, None].chunk(2, dim=1)
        return self.conv2(F.silu(torch.addcmul(shift, self.norm(self.conv1(x)), scale + 1)))


def preconditioned_diffusion_with_average() -> Job:
    return job_of(EDM, lambda m, b: m(b["x"], b["y"]), IMAGES)


class ResidualQuantizer(nn.Module):
    """Several codebooks by moving averages, initialised from the first batch's vectors, dead codes replaced by vectors that are drawn."""

    def __init__(self, levels: int = 2, codes: int = 6, dim: int = 5) -> None:
        super().__init__()
        self.levels, self.codes = levels, codes
        self.register_buffer("embed", torch.randn(levels, codes, dim))
        self.register_buffer("embed_avg", self.embed.clone())
        self.register_buffer("cluster_size", torch.ones(levels, codes))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        residual, out, loss = x, torch.zeros_like(x), x.new_zeros(())
        for level in range(self.levels):
            embed = self.embed[level].clone()
            index = torch.cdist(residual.detach(), embed).argmin(-1)
            quantized = F.embedding(index, embed)
            if self.training:
                with torch.no_grad():
                    onehot = F.one_hot(index, self.codes).type_as(x)
                    self.cluster_size[level].lerp_(onehot.sum(0), 0.1)
                    self.embed_avg[level].lerp_(onehot.t() @ residual.detach(), 0.1)
                    size = self.cluster_size[level]
                    smoothed = (size + 1e-5) / (size.sum() + self.codes * 1e-5) * size.sum()
                    self.embed[level].copy_(self.embed_avg[level] / smoothed.unsqueeze(1))
                    expired = size < 0.5
                    if torch.any(expired):
                        picks = residual.detach()[torch.randint(0, len(x), (self.codes,))]
                        self.embed[level] = torch.where(expired[:, None], picks, self.embed[level])
            loss = loss + F.mse_loss(quantized.detach(), residual)
            quantized = residual + (quantized - residual).detach()
            residual, out = residual - quantized.detach(), out + quantized
        return out, loss


class Codec(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc, self.rvq = nn.Sequential(nn.Linear(6, 11), nn.ELU(), nn.Linear(11, 5)), ResidualQuantizer()
        self.dec = nn.Sequential(nn.Linear(5, 11), nn.ELU(), nn.Linear(11, 6))

    def forward(self, x: Tensor) -> Tensor:
        q, commit = self.rvq(self.enc(x))
        return F.l1_loss(self.dec(q), x) + 0.25 * commit


def residual_quantisation_with_dead_codes() -> Job:
    return job_of(Codec, lambda m, b: m(b["x"]), POINTS)
