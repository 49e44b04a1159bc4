"""Generative models: annealed bounds, flows whose start looks at data, diffusion with per-sample times, adversaries, rays that are sampled twice."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import spectral_norm

import meshloom as ml
from meshloom.core.job import Job
from tests.zoo import adam, integers, job_of, normal, uniform

VECTORS = {"x": normal(571, 6), "y": integers(572, 4)}
IMAGES = {"x": normal(573, 2, 8, 8), "y": integers(574, 4)}
BITS = {"x": integers(575, 5, 7)}


def mlp(*sizes: int, act: Any = nn.SiLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in pairwise(sizes):
        layers += [nn.Linear(i, o), act()]
    return nn.Sequential(*layers[:-1])


class Ladder(nn.Module):
    """Two levels of latents, the prior of the lower made by the upper; free bits; a weight of the KL that grows with the step."""

    def __init__(self) -> None:
        super().__init__()
        self.up1, self.up2 = mlp(6, 10, 8), mlp(8, 8)
        self.q2, self.prior1, self.q1, self.dec = (
            nn.Linear(8, 6),
            mlp(3, 8, 8),
            nn.Linear(16, 8),
            mlp(7, 10, 6),
        )

    @staticmethod
    def kl(m: Tensor, s: Tensor, pm: Tensor, ps: Tensor) -> Tensor:
        return (
            (ps - s + (torch.exp(2 * s) + (m - pm) ** 2) / (2 * torch.exp(2 * ps)) - 0.5)
            .clamp(min=0.05)
            .sum(-1)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h1 = self.up1(x)
        h2 = torch.tanh(self.up2(h1))
        m2, s2 = self.q2(h2).chunk(2, -1)
        z2 = m2 + torch.randn_like(m2) * s2.exp()
        prior = self.prior1(z2)
        pm, ps = prior.chunk(2, -1)
        dm, ds = self.q1(torch.cat([h1, prior], -1)).chunk(2, -1)
        m1, s1 = pm + dm, ps + ds
        z1 = m1 + torch.randn_like(m1) * s1.exp()
        kl = self.kl(m2, s2, torch.zeros_like(m2), torch.zeros_like(s2)) + self.kl(m1, s1, pm, ps)
        return self.dec(torch.cat([z1, z2], -1)), kl


def _annealed(model: Any, b: Any) -> Tensor:
    recon, kl = model(b["x"])
    beta = min(1.0, 0.1 + ml.step() / 10)
    return ((recon - b["x"]) ** 2).sum(-1).mean() + beta * kl.mean()


def ladder_with_annealing() -> Job:
    return job_of(Ladder, _annealed, VECTORS)


class ActNorm(nn.Module):
    """Its bias and scale come from the first batch that it sees, unless they were there already."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.loc, self.scale = nn.Parameter(torch.zeros(1, dim)), nn.Parameter(torch.ones(1, dim))
        self.register_buffer("initialized", torch.tensor(1, dtype=torch.uint8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training and self.initialized.item() == 0:
            with torch.no_grad():
                self.loc.data.copy_(-x.mean(0, keepdim=True))
                self.scale.data.copy_(1 / (x.std(0, keepdim=True) + 1e-6))
                self.initialized.fill_(1)
        return self.scale * (x + self.loc), self.scale.abs().log().sum().expand(len(x))


class MaskedLinear(nn.Linear):
    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask.size(1), mask.size(0))
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask, self.bias)


class Autoregressive(nn.Module):
    """A masked autoregressive layer, then a reversal; and a permutation that is drawn when it is built."""

    def __init__(self, dim: int = 6, hidden: int = 11) -> None:
        super().__init__()
        degrees, inner = torch.arange(dim), torch.arange(hidden) % (dim - 1)
        self.one = MaskedLinear((inner[:, None] >= degrees[None]).float())
        self.two = MaskedLinear((degrees[:, None] > inner[None]).float().repeat(2, 1))
        self.norm, self.register_order = ActNorm(dim), None
        self.register_buffer("order", torch.randperm(dim))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, logdet = self.norm(x[:, self.order])
        shift, log_scale = self.two(F.relu(self.one(x))).chunk(2, -1)
        log_scale = torch.tanh(log_scale)
        return ((x - shift) * torch.exp(-log_scale)).flip(-1), logdet - log_scale.sum(-1)


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Autoregressive() for _ in range(3)])

    def log_prob(self, x: Tensor) -> Tensor:
        total = torch.zeros(len(x)).to(x)
        for layer in self.layers:
            x, logdet = layer(x)
            total = total + logdet
        return total + torch.distributions.MultivariateNormal(
            torch.zeros(6).to(x), torch.eye(6).to(x)
        ).log_prob(x)


def masked_flow_that_starts_at_data() -> Job:
    return job_of(Flow, lambda m, b: -m.log_prob(b["x"] + 0.01 * torch.randn_like(b["x"])).mean(), VECTORS)


class Denoiser(nn.Module):
    """A small U-Net with embeddings of time, classes that are dropped, and a moving copy of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.label = mlp(8, 12, 12), nn.Embedding(5, 12)
        self.down, self.mid, self.up = (
            nn.Conv2d(2, 6, 3, 2, 1),
            nn.Conv2d(6, 6, 3, padding=1),
            nn.ConvTranspose2d(6, 2, 4, 2, 1),
        )
        self.film, self.norm = nn.Linear(12, 12), nn.GroupNorm(3, 6)
        beta = torch.linspace(1e-3, 0.2, 20, dtype=torch.float64)
        for name, value in {"acp": torch.cumprod(1 - beta, 0), "betas": beta}.items():
            self.register_buffer(name, value.float())

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        freqs = torch.exp(-math.log(1000) * torch.arange(4).to(x) / 4)
        args = t[:, None].to(x) * freqs
        emb = self.time(torch.cat([args.cos(), args.sin()], -1)) + self.label(y)
        scale, shift = self.film(F.silu(emb))[..., None, None].chunk(2, 1)
        h = self.norm(self.down(x)) * (1 + scale) + shift
        return self.up(h + self.mid(F.silu(h)))


class Diffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Denoiser()
        self.ema = copy.deepcopy(self.net).requires_grad_(False)

    @torch.no_grad()
    def follow(self, decay: float = 0.9) -> None:
        for e, p in zip(self.ema.parameters(), self.net.parameters(), strict=True):
            e.mul_(decay).add_(p.detach(), alpha=1 - decay)


def _velocity(model: Any, b: Any) -> Tensor:
    """v-prediction with min-SNR weights, times of each sample, classes dropped one time in five."""
    x, n = b["x"], len(b["x"])
    t = torch.randint(0, 20, (n,))
    noise = torch.randn_like(x)
    acp = model.net.acp[t].view(-1, 1, 1, 1).to(x)
    y = torch.where(torch.rand(n) < 0.2, 4, b["y"])
    noisy = acp.sqrt() * x + (1 - acp).sqrt() * noise
    v = model.net(noisy, t, y)
    target = acp.sqrt() * noise - (1 - acp).sqrt() * x
    snr = (acp / (1 - acp)).view(-1)
    weight = torch.minimum(snr, torch.full_like(snr, 5.0)) / (snr + 1)
    model.follow()
    return (F.mse_loss(v, target, reduction="none").mean(dim=[*range(1, v.ndim)]) * weight).mean()


def velocities_with_dropped_classes() -> Job:
    return job_of(Diffusion, _velocity, IMAGES)


class Projection(nn.Module):
    """A discriminator with spectral norms and a projection of the class; a generator with conditional norms."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.ModuleDict(
            {
                "in": nn.Linear(5, 24),
                "gain": nn.Embedding(4, 12),
                "conv": nn.Conv2d(6, 6, 3, padding=1),
                "out": nn.Conv2d(6, 2, 1),
            }
        )
        self.d = nn.ModuleDict(
            {
                "one": spectral_norm(nn.Conv2d(2, 7, 3, 2, 1)),
                "two": spectral_norm(nn.Conv2d(7, 8, 3, 2, 1)),
                "lin": spectral_norm(nn.Linear(8, 1)),
                "emb": spectral_norm(nn.Embedding(4, 8)),
            }
        )
        self.bn = nn.BatchNorm2d(6, affine=False)

    def generate(self, y: Tensor) -> Tensor:
        z = torch.randn(len(y), 5, dtype=self.g["in"].weight.dtype)
        h = F.interpolate(self.g["in"](z).view(-1, 6, 2, 2), scale_factor=4.0)
        gain, bias = self.g["gain"](y)[..., None, None].chunk(2, 1)
        return torch.tanh(self.g["out"](F.relu(self.bn(self.g["conv"](h)) * (1 + gain) + bias)))

    def judge(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.leaky_relu(self.d["two"](F.leaky_relu(self.d["one"](x), 0.2)), 0.2).sum((2, 3))
        return self.d["lin"](h).squeeze(1) + (self.d["emb"](y) * h).sum(1)


def _d_loss(model: Any, b: Any) -> Tensor:
    fake = model.generate(b["y"]).detach()
    real, false = model.judge(torch.cat([b["x"], fake]), torch.cat([b["y"], b["y"]])).chunk(2)
    return F.relu(1.0 - real).mean() + F.relu(1.0 + false).mean()


def _g_loss(model: Any, b: Any) -> Tensor:
    return -model.judge(model.generate(b["y"]), b["y"]).mean()


def hinge_with_projection() -> Job:
    losses = {
        "d": ml.Objective(loss=_d_loss, optimizer=adam, parameters=["d"], updates=2),
        "g": ml.Objective(loss=_g_loss, optimizer=adam, parameters=["g"]),
    }
    rows = [{k: v[i] for k, v in IMAGES.items()} for i in range(24)]
    return Job(model=Projection, losses=losses, data=lambda: rows, batch_size=8, steps=3)


class Radiance(nn.Module):
    """Rays sampled evenly, then where the first network saw something; samples sorted together, composited by cumprod (NeRF)."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse, self.fine = mlp(18, 15, 4, act=nn.ReLU), mlp(18, 15, 13, 4, act=nn.ReLU)
        self.background = nn.Parameter(torch.zeros(3))

    @staticmethod
    def encode(x: Tensor) -> Tensor:
        return torch.cat([f(x * 2.0**i) for i in range(3) for f in (torch.sin, torch.cos)], -1)

    def composite(self, raw: Tensor, z: Tensor, direction: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gap = torch.cat([z[:, 1:] - z[:, :-1], torch.full_like(z[:, :1], 1e10)], -1) * direction.norm(
            dim=-1, keepdim=True
        )
        sigma = F.relu(raw[..., 3] + (torch.randn_like(raw[..., 3]) * 0.1 if self.training else 0))
        alpha = 1 - torch.exp(-sigma * gap)
        clear = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        weights = alpha * clear
        rgb = (weights[..., None] * torch.sigmoid(raw[..., :3])).sum(1)
        depth = (weights * z).sum(1) / weights.sum(1).clamp(min=1e-6)
        return rgb + (1 - weights.sum(1, keepdim=True)) * torch.sigmoid(self.background), weights, depth

    def again(self, z: Tensor, weights: Tensor, n: int) -> Tensor:
        pdf = (weights + 1e-5) / (weights + 1e-5).sum(-1, keepdim=True)
        cdf = torch.cat([torch.zeros_like(pdf[:, :1]), pdf.cumsum(-1)], -1)
        u = torch.rand(len(z), n, dtype=z.dtype).contiguous()
        index = torch.searchsorted(cdf.contiguous(), u, right=True)
        below, above = (index - 1).clamp(min=0), index.clamp(max=cdf.size(-1) - 1)
        low, high = cdf.gather(1, below), cdf.gather(1, above)
        span = torch.where(high - low < 1e-5, torch.ones_like(high), high - low)
        t = (u - low) / span
        z_low, z_high = z.gather(1, below), z.gather(1, above)
        return z_low + t * (z_high - z_low)

    def forward(self, origin: Tensor, direction: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = torch.linspace(0.5, 3.0, 6).to(origin).expand(len(origin), 6)
        middle = 0.5 * (z[:, 1:] + z[:, :-1])
        z = z + (torch.rand_like(z) - 0.5) * 0.3
        z, _ = z.sort(-1)
        points = origin[:, None] + direction[:, None] * z[..., None]
        first, weights, _ = self.composite(self.coarse(self.encode(points)), z, direction)
        more = self.again(middle, weights[:, 1:-1].detach(), 5).detach()
        z, _ = torch.sort(torch.cat([z, more], -1), -1)
        points = origin[:, None] + direction[:, None] * z[..., None]
        second, _, depth = self.composite(self.fine(self.encode(points)), z, direction)
        return first, second, depth


def _photometric(model: Any, b: Any) -> Tensor:
    first, second, depth = model(b["o"], b["d"])
    return F.mse_loss(first, b["rgb"]) + F.mse_loss(second, b["rgb"]) + 1e-3 * depth.var(unbiased=False)


def rays_sampled_twice() -> Job:
    return job_of(
        Radiance,
        _photometric,
        {"o": normal(576, 3) * 0.1, "d": F.normalize(normal(577, 3), dim=-1), "rgb": uniform(578, 3)},
    )


class Splats(nn.Module):
    """Gaussians in the plane, sorted by depth, blended front to back over pixels."""

    def __init__(self, count: int = 9) -> None:
        super().__init__()
        self.mean, self.log_scale, self.angle = (
            nn.Parameter(torch.randn(count, 3)),
            nn.Parameter(torch.zeros(count, 2)),
            nn.Parameter(torch.zeros(count)),
        )
        self.color, self.opacity = (
            nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)),
            nn.Parameter(torch.zeros(count)),
        )
        self.code = nn.Parameter(torch.randn(count, 2))

    def forward(self, camera: Tensor) -> Tensor:
        pixels = (
            torch.stack(torch.meshgrid(torch.linspace(-1, 1, 5), torch.linspace(-1, 1, 4), indexing="ij"), -1)
            .to(camera)
            .view(-1, 2)
        )
        images = []
        for pose in camera:
            centre = self.mean + pose
            order = centre[:, 2].argsort()
            c, s = torch.cos(self.angle), torch.sin(self.angle)
            rotation = torch.stack([torch.stack([c, -s], -1), torch.stack([s, c], -1)], 1)
            root = rotation * self.log_scale.exp().unsqueeze(1)
            inverse = torch.linalg.inv(root @ root.mT + 1e-2 * torch.eye(2).to(root))
            d = pixels[:, None] - centre[None, :, :2]
            alpha = torch.sigmoid(self.opacity) * torch.exp(
                -0.5 * torch.einsum("pni,nij,pnj->pn", d, inverse, d)
            )
            alpha = alpha[:, order].clamp(max=0.99)
            clear = torch.cumprod(F.pad(1 - alpha[:, :-1], (1, 0), value=1.0), -1)
            color = torch.sigmoid(self.color(torch.cat([self.code, pose.expand(len(order), 3)], -1)))[order]
            images.append((alpha * clear) @ color)
        return torch.stack(images)


def splats_sorted_by_depth() -> Job:
    return job_of(
        Splats,
        lambda m, b: F.l1_loss(m(b["pose"]), b["image"]),
        {"pose": normal(579, 3) * 0.2, "image": uniform(580, 20, 3)},
    )


class Absorbing(nn.Module):
    """Masks a share of tokens that is drawn for each text, and predicts them (MaskGIT, MDLM)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.pos = nn.Embedding(6, 12), nn.Parameter(torch.randn(7, 12) * 0.1)
        layer = nn.TransformerEncoderLayer(
            12, 3, 17, dropout=0.1, batch_first=True, norm_first=True, activation="gelu"
        )
        self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(12, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids) + self.pos))


def _masked(model: Any, b: Any) -> Tensor:
    ids = b["x"]
    share = torch.cos(torch.rand(len(ids), 1) * math.pi / 2)
    order = torch.rand(ids.shape).argsort(-1).argsort(-1)
    hidden = order < (share * ids.size(1)).ceil().clamp(min=1)
    logits = model(ids.masked_fill(hidden, 5))
    nll = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none", label_smoothing=0.05)
    return (nll * hidden).sum() / hidden.sum()


def tokens_masked_by_a_drawn_share() -> Job:
    return job_of(Absorbing, _masked, BITS)


class Codes(nn.Module):
    """Codes with a straight-through estimator; the weight of the adversary from two gradients at the decoder's last layer (VQGAN)."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec, self.last = mlp(6, 10, 4), mlp(4, 10), nn.Linear(10, 6)
        self.codebook, self.judge = nn.Embedding(7, 4), mlp(6, 9, 1).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.enc(x)
        distance = (
            z.pow(2).sum(-1, keepdim=True)
            - 2 * z @ self.codebook.weight.t()
            + self.codebook.weight.pow(2).sum(-1)
        )
        index = distance.argmin(-1)
        q = self.codebook(index)
        commit = F.mse_loss(q.detach(), z) * 0.25 + F.mse_loss(q, z.detach())
        probabilities = F.one_hot(index, 7).to(z).mean(0)
        perplexity = torch.exp(-(probabilities * torch.log(probabilities + 1e-10)).sum())
        return self.last(F.silu(self.dec(z + (q - z).detach()))), commit, perplexity


def _adaptive(model: Any, b: Any) -> Tensor:
    recon, commit, _ = model(b["x"])
    nll, g = (recon - b["x"]).abs().mean(), -model.judge(recon).mean()
    weight = model.last.weight
    nll_grad = torch.autograd.grad(nll, weight, retain_graph=True)[0]
    g_grad = torch.autograd.grad(g, weight, retain_graph=True)[0]
    balance = (nll_grad.norm() / (g_grad.norm() + 1e-4)).clamp(0.0, 1e4).detach()
    return nll + 0.5 * balance * g + commit


def adversaries_weighted_by_gradients() -> Job:
    return job_of(Codes, _adaptive, VECTORS)
