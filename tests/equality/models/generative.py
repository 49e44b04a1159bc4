"""Generative models and losses that draw, differentiate, or use a teacher."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.equality.model import Model, Samples, normal, whole
from tests.equality.models.dense import own_loss


class Diffusion(nn.Module):
    """[batch, 1, 4, 4] and times -> noise: convolutions that are scaled and shifted by an embedding of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 12))
        self.enter = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6, affine=False)
        self.middle = nn.Conv2d(6, 6, 3, padding=1)
        self.leave = nn.Conv2d(6, 1, 3, padding=1)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        angles = times[:, None] * torch.exp(-math.log(100.0) * torch.arange(3) / 3)
        scale, shift = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1)).chunk(2, dim=-1)
        x = F.silu(self.enter(x))
        x = x + F.silu(self.norm(self.middle(x)) * (1 + scale[:, :, None, None]) + shift[:, :, None, None])
        return self.leave(x)


def denoise(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Draws times and noise."""
    x = batch["x"]
    times = torch.rand(x.shape[0], dtype=x.dtype)
    noise = torch.randn_like(x)
    level = torch.cos(times * math.pi / 2)[:, None, None, None]
    return F.mse_loss(model(level * x + (1 - level**2).sqrt() * noise, 10 * times), noise)


class VAE(nn.Module):
    """[batch, 9] -> reconstruction, mean and log variance of a drawn code."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(9, 11), nn.Tanh())
        self.moments = nn.Linear(11, 2 * 3)
        self.decoder = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 9))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        mean, log_variance = self.moments(self.encoder(batch["x"])).chunk(2, dim=-1)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        likelihood = F.mse_loss(self.decoder(code), batch["x"], reduction="none").sum(-1)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1)
        return (likelihood + 0.1 * divergence).mean()


class Flow(nn.Module):
    """[batch, 6] -> negative log likelihood: couplings of halves that change places, and a learned mixing."""

    def __init__(self) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(3)
        )
        self.log_scale = nn.Parameter(torch.zeros(6))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"] * self.log_scale.exp()
        log_volume = self.log_scale.sum()
        for coupling in self.couplings:
            kept, moved = x.chunk(2, dim=-1)
            log_scale, shift = coupling(kept).chunk(2, dim=-1)
            moved = moved * torch.exp(torch.tanh(log_scale)) + shift
            log_volume = log_volume + torch.tanh(log_scale).sum(-1)
            x = torch.cat([moved, kept], dim=-1)
        return (0.5 * x.square().sum(-1) - log_volume).mean()


class VQ(nn.Module):
    """[batch, 8] -> reconstruction through the nearest of 7 codes; gradients pass straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 2 * 4)
        self.codes = nn.Embedding(7, 4)
        self.decoder = nn.Sequential(nn.Linear(8, 9), nn.GELU(), nn.Linear(9, 8))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        found = self.encoder(batch["x"]).unflatten(-1, (2, 4))
        distances = (found.unsqueeze(2) - self.codes.weight).square().sum(-1)
        nearest = self.codes(distances.argmin(-1))
        code = found + (nearest - found).detach()
        fit = F.mse_loss(nearest, found.detach()) + 0.25 * F.mse_loss(found, nearest.detach())
        return F.mse_loss(self.decoder(code.flatten(1)), batch["x"]) + fit


class MaskedConv(nn.Conv2d):
    """Sees the pixels before its own alone."""

    def __init__(self, channels: int, out: int, *, own: bool) -> None:
        super().__init__(channels, out, 3, padding=1)
        mask = torch.ones(3, 3)
        mask[1, 1 + own :] = 0
        mask[2:] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.mask, self.bias, padding=1)


class PixelCNN(nn.Module):
    """[batch, 4, 4] levels -> logits of each by those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = MaskedConv(1, 6, own=False)
        self.second = MaskedConv(6, 6, own=True)
        self.third = MaskedConv(6, 7, own=True)
        self.head = nn.Conv2d(7, 4, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["levels"].unsqueeze(1).to(self.head.weight.dtype) / 3
        x = F.elu(self.first(x))
        x = F.elu(self.third(x + F.elu(self.second(x))))
        return F.cross_entropy(self.head(x), batch["levels"])


class Score(nn.Module):
    """[batch, 5] -> [batch]: an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(5, 9), nn.Softplus(), nn.Linear(9, 7), nn.Softplus(), nn.Linear(7, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).squeeze(-1)


def match_scores(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss takes the gradient of the energy, which is differentiated again."""
    noise = batch["noise"]
    x = (batch["x"] + 0.5 * noise).requires_grad_()
    (score,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (0.5 * score - noise).square().sum(-1).mean()


class Distilled(nn.Module):
    """[batch, 7] -> loss of a student against a fixed teacher and labels."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 5)).requires_grad_(False)
        self.student = nn.Sequential(nn.Linear(7, 9), nn.GELU(), nn.Linear(9, 6), nn.GELU(), nn.Linear(6, 5))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            taught = (self.teacher(batch["x"]) / 2).softmax(-1)
        found = self.student(batch["x"])
        soft = F.kl_div((found / 2).log_softmax(-1), taught, reduction="batchmean")
        return 0.5 * F.cross_entropy(found, batch["y"]) + 2.0 * soft


class Spectral(nn.Module):
    """[batch, 12] -> loss of its continuation: weights of frequencies, complex numbers on the way, integers in."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(2, 5)
        self.weights = nn.Parameter(0.3 * torch.randn(5, 5, 4, 2))
        self.local = nn.Linear(5, 5)
        self.leave = nn.Linear(5, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        level = batch["levels"].to(self.leave.weight.dtype) / 128 - 1
        x = self.enter(torch.stack([level, level.flip(1)], dim=-1))
        modes = torch.fft.rfft(x, dim=1)[:, :4]
        mixed = torch.einsum("bki,iok->bko", modes, torch.view_as_complex(self.weights))
        x = F.gelu(torch.fft.irfft(mixed, n=x.shape[1], dim=1) + self.local(x))
        return F.huber_loss(self.leave(x).squeeze(-1)[:, :-1], level[:, 1:], delta=0.5)


def squares(count: int) -> Samples:
    return Samples(x=normal(70, count, 1, 4, 4))


def numbers(width: int, seed: int) -> object:
    """x [width] normal, y one of 5 classes, noise as x."""

    def build(count: int) -> Samples:
        return Samples(
            x=normal(seed, count, width), y=whole(seed + 1, 5, count), noise=normal(seed + 2, count, width)
        )

    return build


def levels(count: int) -> Samples:
    return Samples(levels=whole(71, 4, count, 4, 4))


def bytes_(count: int) -> Samples:
    return Samples(levels=whole(72, 256, count, 12).to(torch.uint8))


GENERATIVE = [
    Model(
        name="diffusion",
        interacts=True,
        features="draws in the loss, modulation by time; batch = size",
        build=Diffusion,
        loss=denoise,
        samples=squares,
        chunk=4,
        stages=1,
    ),
    Model(
        name="vae",
        interacts=True,
        features="draws in the model",
        build=VAE,
        loss=own_loss,
        samples=numbers(9, 73),
        stages=2,
    ),
    Model(
        name="flow",
        features="couplings, log volumes",
        build=Flow,
        loss=own_loss,
        samples=numbers(6, 76),
        stages=2,
    ),
    Model(
        name="vq",
        features="nearest codes, straight through",
        build=VQ,
        loss=own_loss,
        samples=numbers(8, 79),
        stages=2,
    ),
    Model(
        name="pixel_cnn",
        features="masked weights, buffers, integers",
        build=PixelCNN,
        loss=own_loss,
        samples=levels,
        chunk=2,
        stages=2,
    ),
    Model(
        name="score",
        features="gradients in the loss",
        build=Score,
        loss=match_scores,
        samples=numbers(5, 82),
        stages=1,
    ),
    Model(
        name="distilled",
        features="a fixed teacher",
        build=Distilled,
        loss=own_loss,
        samples=numbers(7, 85),
        stages=2,
    ),
    Model(
        name="spectral",
        features="complex numbers, bytes",
        build=Spectral,
        loss=own_loss,
        samples=bytes_,
        stages=2,
    ),
]
