"""Generative models: two losses in turn, regularisers every so often, pools of old images, flows by splines, noise by levels."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, autograd, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import meshloom as ml
from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal, uniform

IMAGES = {"x": uniform(341, 3, 8, 8) * 2 - 1, "y": integers(342, 4)}
POINTS = {"x": normal(343, 6)}


def _adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for _, p in named], lr=1e-2, betas=(0.0, 0.99))


class StyleGAN(nn.Module):
    """Weights modulated and demodulated by styles, noise with learned strength, equalised learning rates, minibatch deviation;
    the length of paths is kept in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.d = Generator(), Discriminator()
        self.register_buffer("mean_path_length", torch.zeros(()))


class EqualLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int, bias_init: float = 0.0) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(outputs, inputs)),
            nn.Parameter(torch.zeros(outputs).fill_(bias_init)),
        )
        self.scale = 1 / math.sqrt(inputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.scale, bias=self.bias)


class ModulatedConv(nn.Module):
    def __init__(self, inputs: int, outputs: int, style: int) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.weight = nn.Parameter(torch.randn(1, outputs, inputs, 3, 3))
        self.modulation, self.noise = EqualLinear(style, inputs, bias_init=1.0), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        batch, inputs, height, width = x.shape
        style = self.modulation(style).view(batch, 1, inputs, 1, 1)
        weight = self.weight / math.sqrt(inputs * 9) * style
        demod = torch.rsqrt(weight.pow(2).sum([2, 3, 4]) + 1e-8)
        weight = (weight * demod.view(batch, self.outputs, 1, 1, 1)).view(batch * self.outputs, inputs, 3, 3)
        out = F.conv2d(x.reshape(1, batch * inputs, height, width), weight, padding=1, groups=batch)
        out = out.view(batch, self.outputs, height, width)
        return out + self.noise * out.new_empty(batch, 1, height, width).normal_()


class Generator(nn.Module):
    def __init__(self, style: int = 5) -> None:
        super().__init__()
        self.style = nn.Sequential(
            *[layer for _ in range(2) for layer in (EqualLinear(style, style), nn.LeakyReLU(0.2))]
        )
        self.constant = nn.Parameter(torch.randn(1, 6, 4, 4))
        self.conv1, self.conv2, self.rgb = (
            ModulatedConv(6, 7, style),
            ModulatedConv(7, 5, style),
            nn.Conv2d(5, 3, 1),
        )

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        w = self.style(z * torch.rsqrt(torch.mean(z**2, dim=1, keepdim=True) + 1e-8))
        x = F.leaky_relu(self.conv1(self.constant.repeat(len(z), 1, 1, 1), w), 0.2)
        x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        return self.rgb(F.leaky_relu(self.conv2(x, w), 0.2)), w


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(6, 7, 3, stride=2), nn.LeakyReLU(0.2)
        )
        self.final = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.convs(x)
        batch, channel, height, width = out.shape
        group = 2 if batch % 2 == 0 else 1
        std = out.view(group, -1, 1, channel, height, width)
        std = torch.sqrt(std.var(0, unbiased=False) + 1e-8).mean([2, 3, 4], keepdim=True).squeeze(2)
        return self.final(torch.cat([out, std.repeat(group, 1, height, width)], 1).mean((2, 3)))


def _d_loss(model: Any, b: Any) -> Tensor:
    real = b["x"].detach().requires_grad_(True)
    fake, _ = model.g(torch.randn(len(real), 5, dtype=real.dtype))
    pred = model.d(real)
    loss = F.softplus(-pred).mean() + F.softplus(model.d(fake.detach())).mean()
    (grad_real,) = autograd.grad(outputs=pred.sum(), inputs=real, create_graph=True)
    return loss + 5 * grad_real.pow(2).reshape(grad_real.shape[0], -1).sum(1).mean()


def _g_loss(model: Any, b: Any) -> Tensor:
    fake, w = model.g(torch.randn(len(b["x"]), 5, dtype=b["x"].dtype))
    loss = F.softplus(-model.d(fake)).mean()
    noise = torch.randn_like(fake) / math.sqrt(fake.shape[2] * fake.shape[3])
    (grad,) = autograd.grad(outputs=(fake * noise).sum(), inputs=w, create_graph=True)
    lengths = torch.sqrt(grad.pow(2).sum(1) + 1e-8)
    path_mean = model.mean_path_length + 0.01 * (lengths.mean() - model.mean_path_length)
    penalty = (lengths - path_mean).pow(2).mean()
    model.mean_path_length = path_mean.detach()
    return loss + 2 * penalty


def style_gan() -> Job:
    losses = {
        "d": ml.Objective(loss=_d_loss, optimizer=_adam, parameters="d"),
        "g": ml.Objective(loss=_g_loss, optimizer=_adam, parameters="g"),
    }
    return Job(model=StyleGAN, losses=losses, data=lambda: _rows(IMAGES), batch_size=8, steps=3)


def _rows(data: dict[str, Tensor]) -> list[Any]:
    return [{name: each[i] for name, each in data.items()} for i in range(24)]


class ConditionalBatchNorm(nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.features, self.bn, self.embed = (
            features,
            nn.BatchNorm2d(features, affine=False),
            nn.Embedding(classes, 2 * features),
        )
        self.embed.weight.data[:, :features].normal_(1, 0.02)
        self.embed.weight.data[:, features:].zero_()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        gamma, beta = self.embed(y).chunk(2, 1)
        return gamma.view(-1, self.features, 1, 1) * self.bn(x) + beta.view(-1, self.features, 1, 1)


class BigGAN(nn.Module):
    """Spectral normalisation by parametrizations, conditional norms, a projection discriminator, hinge losses."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.ModuleDict({"fc": spectral_norm(nn.Linear(5, 6 * 16)), "cbn": ConditionalBatchNorm(6, 4), "out": spectral_norm(nn.Conv2d(6, 3, 3, padding=1))})  # fmt: skip
        self.d = nn.ModuleDict({"conv": spectral_norm(nn.Conv2d(3, 7, 3, stride=2)), "fc": spectral_norm(nn.Linear(7, 1)), "embed": spectral_norm(nn.Embedding(4, 7))})  # fmt: skip

    def generate(self, z: Tensor, y: Tensor) -> Tensor:
        x = self.g["cbn"](self.g["fc"](z).view(-1, 6, 4, 4), y)
        return torch.tanh(self.g["out"](F.interpolate(F.relu(x), scale_factor=2)))

    def judge(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.relu(self.d["conv"](x)).sum([2, 3])
        return self.d["fc"](h) + torch.sum(self.d["embed"](y) * h, 1, keepdim=True)


def _hinge_d(model: Any, b: Any) -> Tensor:
    with torch.no_grad():
        fake = model.generate(torch.randn(len(b["x"]), 5).to(b["x"]), b["y"])
    out = model.judge(torch.cat([b["x"], fake]), torch.cat([b["y"], b["y"]]))
    real, fake = torch.split(out, [len(b["x"]), len(fake)])
    return torch.mean(F.relu(1.0 - real)) + torch.mean(F.relu(1.0 + fake))


def _hinge_g(model: Any, b: Any) -> Tensor:
    return -torch.mean(model.judge(model.generate(torch.randn(len(b["x"]), 5).to(b["x"]), b["y"]), b["y"]))


def big_gan() -> Job:
    losses = {
        "d": ml.Objective(loss=_hinge_d, optimizer=_adam, parameters="d", updates=2),
        "g": ml.Objective(loss=_hinge_g, optimizer=_adam, parameters="g"),
    }
    return Job(model=BigGAN, losses=losses, data=lambda: _rows(IMAGES), batch_size=8, steps=3)


class CycleGAN(nn.Module):
    """Two generators with reflection padding, identity losses, least squares; the other domain is what is flipped."""

    def __init__(self) -> None:
        super().__init__()
        g = lambda: nn.Sequential(nn.ReflectionPad2d(1), weight_norm(nn.Conv2d(3, 6, 3)), nn.InstanceNorm2d(6), nn.ReLU(True), nn.ConvTranspose2d(6, 3, 3, padding=1), nn.Tanh())  # noqa: E731  # fmt: skip
        d = lambda: nn.Sequential(nn.Conv2d(3, 5, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(5, 1, 3, 1, 1))  # noqa: E731
        self.g_ab, self.g_ba, self.d_a, self.d_b = g(), g(), d(), d()


def _generators(model: Any, b: Any) -> Tensor:
    a, t = b["x"], b["x"].flip(-1)
    fake_b, fake_a = model.g_ab(a), model.g_ba(t)
    d_b, d_a = model.d_b(fake_b), model.d_a(fake_a)
    gan = F.mse_loss(d_b, torch.ones_like(d_b)) + F.mse_loss(d_a, torch.ones_like(d_a))
    cycle = F.l1_loss(model.g_ba(fake_b), a) + F.l1_loss(model.g_ab(fake_a), t)
    return gan + 10.0 * cycle + 5.0 * (F.l1_loss(model.g_ab(t), t) + F.l1_loss(model.g_ba(a), a))


def _discriminators(model: Any, b: Any) -> Tensor:
    a, t = b["x"], b["x"].flip(-1)
    loss = 0
    for d, real, fake in ((model.d_a, a, model.g_ba(t).detach()), (model.d_b, t, model.g_ab(a).detach())):
        if random.uniform(0, 1) > 0.5:
            fake = fake.flip(0)
        pred_real, pred_fake = d(real), d(fake)
        target = torch.tensor(1.0).expand_as(pred_real).to(pred_real)
        loss += (F.mse_loss(pred_real, target) + F.mse_loss(pred_fake, torch.zeros_like(target))) * 0.5
    return loss


def cycle_gan() -> Job:
    losses = {
        "g": ml.Objective(loss=_generators, optimizer=_adam, parameters=["g_ab", "g_ba"]),
        "d": ml.Objective(loss=_discriminators, optimizer=_adam, parameters=["d_a", "d_b"]),
    }
    return Job(model=CycleGAN, losses=losses, data=lambda: _rows(IMAGES), batch_size=8, steps=3)


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
