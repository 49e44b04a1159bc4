"""Generative models: two losses in turn, regularisers every so often, pools of old images, flows by splines, noise by levels."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor, autograd, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import meshloom as ml
from meshloom.core.job import Job
from tests.zoo import integers, normal, uniform

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
        sn = spectral_norm
        self.g = nn.ModuleDict({"fc": sn(nn.Linear(5, 6 * 16)), "cbn": ConditionalBatchNorm(6, 4), "out": sn(nn.Conv2d(6, 3, 3, padding=1))})  # fmt: skip
        self.d = nn.ModuleDict({"conv": sn(nn.Conv2d(3, 7, 3, stride=2)), "fc": sn(nn.Linear(7, 1)), "embed": sn(nn.Embedding(4, 7))})  # fmt: skip

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
        wn = weight_norm
        g = lambda: nn.Sequential(nn.ReflectionPad2d(1), wn(nn.Conv2d(3, 6, 3)), nn.InstanceNorm2d(6), nn.ReLU(True), nn.ConvTranspose2d(6, 3, 3, padding=1), nn.Tanh())  # noqa: E731  # fmt: skip
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
