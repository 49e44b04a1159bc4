"""Generative models: codebooks, flows, diffusion, scores, masks of autoregressive layers."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import job_of, normal, uniform

X = {"x": normal(81, 7)}
IMAGES = {"x": uniform(82, 1, 6, 6)}


def _own(model: Any, batch: Any) -> Any:
    return model(batch["x"])


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(36, 13), nn.Linear(13, 5), nn.Linear(13, 5)
        self.fc3, self.fc4 = nn.Linear(5, 13), nn.Linear(13, 36)

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return eps.mul(std).add_(mu)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.fc1(x.view(-1, 36)))
        mu, logvar = self.fc21(h), self.fc22(h)
        recon = torch.sigmoid(self.fc4(F.relu(self.fc3(self.reparameterize(mu, logvar)))))
        bce = F.binary_cross_entropy(recon, x.view(-1, 36), reduction="sum")
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return (bce + kld) / x.size(0)


def vae() -> Job:
    return job_of(VAE, _own, IMAGES)


class VectorQuantizer(nn.Module):
    def __init__(self, codes: int = 9, dim: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(codes, dim)
        self.embedding.weight.data.uniform_(-1.0, 1.0)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = z.permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, z.size(-1))
        d = (flat**2).sum(1, keepdim=True) + (self.embedding.weight**2).sum(1) - 2 * flat @ self.embedding.weight.t()  # fmt: skip
        indices = torch.argmin(d, dim=1).unsqueeze(1)
        encodings = torch.zeros(indices.shape[0], self.embedding.num_embeddings, dtype=z.dtype)
        encodings.scatter_(1, indices, 1)
        quantized = torch.matmul(encodings, self.embedding.weight).view(z.shape)
        loss = F.mse_loss(quantized, z.detach()) + 0.25 * F.mse_loss(quantized.detach(), z)
        quantized = z + (quantized - z).detach()
        avg = torch.mean(encodings, dim=0)
        return (
            loss,
            quantized.permute(0, 3, 1, 2).contiguous(),
            torch.exp(-torch.sum(avg * torch.log(avg + 1e-10))),
        )


class EMAQuantizer(nn.Module):
    """The codebook is a moving average of what is assigned to it."""

    def __init__(self, codes: int = 9, dim: int = 5) -> None:
        super().__init__()
        embed = torch.randn(dim, codes)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.ones(codes))
        self.register_buffer("embed_avg", embed.clone())
        self.embed: Tensor
        self.cluster_size: Tensor
        self.embed_avg: Tensor

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = z.permute(0, 2, 3, 1)
        flat = z.reshape(-1, z.size(-1))
        dist = (
            flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.embed + self.embed.pow(2).sum(0, keepdim=True)
        )
        _, ind = (-dist).max(1)
        onehot = F.one_hot(ind, self.embed.size(1)).type(flat.dtype)
        quantize = F.embedding(ind.view(*z.shape[:-1]), self.embed.transpose(0, 1))
        if self.training:
            self.cluster_size.data.mul_(0.9).add_(onehot.sum(0), alpha=0.1)
            self.embed_avg.data.mul_(0.9).add_((flat.transpose(0, 1) @ onehot).data, alpha=0.1)
            n = self.cluster_size.sum()
            size = (self.cluster_size + 1e-5) / (n + 9 * 1e-5) * n
            self.embed.data.copy_(self.embed_avg / size.unsqueeze(0))
        diff = (quantize.detach() - z).pow(2).mean()
        return diff, (z + (quantize - z).detach()).permute(0, 3, 1, 2), n if self.training else diff


class VQVAE(nn.Module):
    def __init__(self, quantizer: Any) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, 7, 2, 2), nn.ReLU(), nn.Conv2d(7, 5, 1))
        self.quantizer, self.dec = quantizer(), nn.Sequential(nn.ConvTranspose2d(5, 7, 2, 2), nn.ReLU(), nn.Conv2d(7, 1, 1))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        vq_loss, z, perplexity = self.quantizer(self.enc(x))
        if perplexity.item() != perplexity.item():
            raise ValueError("the codebook is not a number")
        return vq_loss + F.mse_loss(self.dec(z), x) / 0.06


def vq_vae() -> Job:
    return job_of(lambda: VQVAE(VectorQuantizer), _own, IMAGES)


def vq_vae_with_moving_codebook() -> Job:
    return job_of(lambda: VQVAE(EMAQuantizer), _own, IMAGES)


class Coupling(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.mask: Tensor
        net = lambda: nn.Sequential(nn.Linear(7, 11), nn.LeakyReLU(), nn.Linear(11, 7), nn.Tanh())  # noqa: E731
        self.s, self.t = net(), net()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x_ = x * self.mask
        s, t = self.s(x_) * (1 - self.mask), self.t(x_) * (1 - self.mask)
        return (1 - self.mask) * (x - t) * torch.exp(-s) + x_, -s.sum(dim=1)


class RealNVP(nn.Module):
    """Masks that alternate, batch norm between, and a matrix whose determinant is taken."""

    def __init__(self) -> None:
        super().__init__()
        masks = torch.from_numpy(
            np.array([[0, 1, 0, 1, 0, 1, 0], [1, 0, 1, 0, 1, 0, 1]] * 2).astype(np.float32)
        )
        self.layers = nn.ModuleList([Coupling(mask) for mask in masks])
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(7, 7))[0])

    def forward(self, x: Tensor) -> Tensor:
        log_det = torch.zeros(x.size(0), dtype=x.dtype)
        for layer in self.layers:
            x, d = layer(x)
            log_det += d
        log_det = log_det + torch.slogdet(self.weight)[1]
        z = x @ self.weight
        prior = torch.distributions.MultivariateNormal(
            torch.zeros(7, dtype=x.dtype), torch.eye(7, dtype=x.dtype)
        )
        return -(prior.log_prob(z) + log_det).mean()


def real_nvp_with_invertible_matrix() -> Job:
    return job_of(RealNVP, _own, X)


class MaskedLinear(nn.Linear):
    def __init__(self, inputs: int, outputs: int, mask: np.ndarray) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("mask", torch.from_numpy(mask.astype(np.uint8).T))
        self.mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.mask * self.weight, self.bias)


class MADE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        order, hidden = np.arange(7), np.random.RandomState(1).randint(0, 6, size=13)
        self.one = MaskedLinear(7, 13, order[:, None] <= hidden[None, :])
        self.two = MaskedLinear(13, 14, np.concatenate([hidden[:, None] < order[None, :]] * 2, axis=1))

    def forward(self, x: Tensor) -> Tensor:
        mu, log_sigma = self.two(F.relu(self.one(x))).chunk(2, dim=1)
        u = (x - mu) * torch.exp(-log_sigma)
        return (0.5 * (u**2 + math.log(2 * math.pi)) + log_sigma).sum(1).mean()


def made() -> Job:
    return job_of(MADE, _own, X)


class Denoiser(nn.Module):
    def __init__(self, dim: int = 7) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 13), nn.SiLU(), nn.Linear(13, 11))
        self.inp, self.mid, self.out = nn.Linear(dim, 11), nn.Linear(11, 11), nn.Linear(11, dim)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        half = 4
        freqs = torch.exp(-math.log(10000) * torch.arange(half, dtype=x.dtype) / half)
        args = t[:, None].to(x.dtype) * freqs[None]
        emb = self.time(torch.cat([torch.cos(args), torch.sin(args)], dim=-1))
        return self.out(F.silu(self.mid(F.silu(self.inp(x) + emb))))


def extract(a: Tensor, t: Tensor, shape: Any) -> Tensor:
    return a.gather(-1, t).reshape(t.shape[0], *((1,) * (len(shape) - 1)))


class DDPM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        betas = torch.linspace(1e-3, 0.1, 20)
        bar = torch.cumprod(1 - betas, axis=0)  # type: ignore[call-overload]
        self.register_buffer("sqrt_bar", torch.sqrt(bar))
        self.register_buffer("sqrt_one_minus_bar", torch.sqrt(1.0 - bar))
        self.sqrt_bar: Tensor
        self.sqrt_one_minus_bar: Tensor
        self.model = Denoiser()

    def forward(self, x0: Tensor) -> Tensor:
        t = torch.randint(0, 20, (x0.shape[0],)).long()
        noise = torch.randn_like(x0)
        noisy = (
            extract(self.sqrt_bar, t, x0.shape) * x0 + extract(self.sqrt_one_minus_bar, t, x0.shape) * noise
        )
        loss = F.mse_loss(self.model(noisy, t), noise, reduction="none")
        snr = extract(self.sqrt_bar, t, x0.shape) ** 2 / extract(self.sqrt_one_minus_bar, t, x0.shape) ** 2
        return (loss * torch.clamp(snr, max=5.0)).mean()


def ddpm() -> Job:
    return job_of(DDPM, _own, X)


def _flow_matching(model: Any, batch: Any) -> Tensor:
    x1 = batch["x"]
    x0, t = torch.randn_like(x1), torch.rand(x1.shape[0]).type_as(x1)
    tpad = t.reshape(-1, *([1] * (x1.dim() - 1)))
    xt = tpad * x1 + (1 - tpad) * x0 + 0.1 * torch.randn_like(x1)
    return torch.mean((model(xt, 100 * t) - (x1 - x0)) ** 2)


def flow_matching() -> Job:
    return job_of(Denoiser, _flow_matching, X)


def _score_matching(model: Any, batch: Any) -> Tensor:
    """Sliced: the score's directional derivative, by autograd inside the loss."""
    x = batch["x"].clone().requires_grad_(True)
    v = torch.randn_like(x)
    score = model(x, torch.zeros(x.size(0), dtype=x.dtype))
    (grad,) = torch.autograd.grad((score * v).sum(), x, create_graph=True)
    return ((v * grad).sum(-1) + 0.5 * (score * v).sum(-1) ** 2).mean()


def sliced_score_matching() -> Job:
    return job_of(Denoiser, _score_matching, X)


class EnergyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 11), nn.SiLU(), nn.Linear(11, 9), nn.SiLU(), nn.Linear(9, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(-1)


def _langevin(model: Any, batch: Any) -> Tensor:
    fake = torch.randn_like(batch["x"])
    for _ in range(3):
        fake = fake.detach().requires_grad_(True)
        grad = torch.autograd.grad(model(fake).sum(), fake)[0]
        fake = fake - 0.1 * grad.clamp(-0.5, 0.5) + 0.05 * torch.randn_like(fake)
    fake = fake.detach()
    pos, neg = model(batch["x"]), model(fake)
    return (pos - neg).mean() + 0.1 * (pos**2 + neg**2).mean()


def energy_based_with_langevin() -> Job:
    return job_of(EnergyModel, _langevin, X)


def _penalised(model: Any, batch: Any) -> Tensor:
    real, fake = batch["x"], torch.randn_like(batch["x"])
    alpha = torch.rand(real.size(0), 1, dtype=real.dtype).expand_as(real)
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    out = model(mixed)
    grads = torch.autograd.grad(outputs=out, inputs=mixed, grad_outputs=torch.ones_like(out), create_graph=True, retain_graph=True, only_inputs=True)[0]  # fmt: skip
    return model(fake).mean() - model(real).mean() + 10 * ((grads.view(grads.size(0), -1).norm(2, dim=1) - 1) ** 2).mean()  # fmt: skip


def gradient_penalty() -> Job:
    return job_of(EnergyModel, _penalised, X)


class MaskedConv2d(nn.Conv2d):
    def __init__(self, mask_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("mask", self.weight.data.clone())
        self.mask: Tensor
        _, _, h, w = self.weight.size()
        self.mask.fill_(1)
        self.mask[:, :, h // 2, w // 2 + (mask_type == "B") :] = 0
        self.mask[:, :, h // 2 + 1 :] = 0

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= self.mask
        return super().forward(x)


def pixel_cnn() -> Job:
    """A mask that is multiplied into the weight's data, in every forward."""

    def model() -> nn.Module:
        return nn.Sequential(
            MaskedConv2d("A", 1, 7, 3, 1, 1, bias=False), nn.BatchNorm2d(7), nn.ReLU(True), MaskedConv2d("B", 7, 7, 3, 1, 1, bias=False),
            nn.BatchNorm2d(7), nn.ReLU(True), nn.Conv2d(7, 4, 1),
        )  # fmt: skip

    return job_of(model, lambda m, b: F.cross_entropy(m(b["x"]), (b["x"][:, 0] * 3.99).long()), IMAGES)


class Consistency(nn.Module):
    """A student beside a teacher that is no part of training, at neighbouring noise levels."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Denoiser()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        sigmas = torch.linspace(0.1, 3.0, 9, dtype=x.dtype)
        n = torch.randint(0, 8, (x.size(0),))
        noise = torch.randn_like(x)
        lower, upper = sigmas[n].unsqueeze(1), sigmas[n + 1].unsqueeze(1)
        ahead = self.student(x + upper * noise, upper.squeeze(1))
        with torch.no_grad():
            behind = self.teacher(x + lower * noise, lower.squeeze(1))
        c = 0.00054 * math.sqrt(x[0].numel())
        return (torch.sqrt((ahead - behind) ** 2 + c**2) - c).mean()


def consistency() -> Job:
    return job_of(Consistency, _own, X)
