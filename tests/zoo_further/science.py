"""Science: operators on functions, equivariance by einsum, equations in the loss, dynamics found or integrated."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal, uniform

FIELDS = {"a": normal(621, 8, 8), "u": normal(622, 8, 8)}
POINTS = {"x": uniform(623), "t": uniform(624)}
ATOMS = {"z": integers(625, 4, 5), "r": normal(626, 5, 3) * 1.5, "e": normal(627), "f": normal(628, 5, 3)}
PATHS = {"x0": normal(629, 3), "x": normal(630, 5, 3)}


class Adaptive(nn.Module):
    """Mixes frequencies by blocks of a complex MLP, with a soft threshold (AFNO)."""

    def __init__(self, width: int = 8, blocks: int = 2) -> None:
        super().__init__()
        size = width // blocks
        self.blocks, self.w1, self.w2 = (
            blocks,
            nn.Parameter(0.3 * torch.randn(2, blocks, size, size)),
            nn.Parameter(0.3 * torch.randn(2, blocks, size, size)),
        )
        self.b1 = nn.Parameter(0.1 * torch.randn(2, blocks, size))
        self.mlp, self.norm = (
            nn.Sequential(nn.Linear(width, 13), nn.GELU(), nn.Linear(13, width)),
            nn.LayerNorm(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        spectrum = torch.fft.rfft2(self.norm(x), dim=(1, 2), norm="ortho")
        spectrum = spectrum.reshape(b, h, w // 2 + 1, self.blocks, c // self.blocks)
        kept = min(h, w) // 2
        o1r = torch.zeros_like(spectrum.real)
        o1i, o2r, o2i = torch.zeros_like(o1r), torch.zeros_like(o1r), torch.zeros_like(o1r)
        real, imag = spectrum.real[:, :, :kept], spectrum.imag[:, :, :kept]
        mix = lambda x, w: torch.einsum("...bi,bio->...bo", x, w)  # noqa: E731
        o1r[:, :, :kept] = F.relu(mix(real, self.w1[0]) - mix(imag, self.w1[1]) + self.b1[0])
        o1i[:, :, :kept] = F.relu(mix(imag, self.w1[0]) + mix(real, self.w1[1]) + self.b1[1])
        o2r[:, :, :kept] = mix(o1r[:, :, :kept], self.w2[0]) - mix(o1i[:, :, :kept], self.w2[1])
        o2i[:, :, :kept] = mix(o1i[:, :, :kept], self.w2[0]) + mix(o1r[:, :, :kept], self.w2[1])
        out = F.softshrink(torch.stack([o2r, o2i], -1), lambd=0.01)
        out = torch.view_as_complex(out).reshape(b, h, w // 2 + 1, c)
        x = x + torch.fft.irfft2(out, s=(h, w), dim=(1, 2), norm="ortho")
        return x + self.mlp(x)


class Neural(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.blocks, self.out = (
            nn.Linear(3, 8),
            nn.Sequential(Adaptive(), Adaptive()),
            nn.Linear(8, 1),
        )

    def forward(self, a: Tensor) -> Tensor:
        line = torch.linspace(0, 1, a.size(1)).to(a)
        grid = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1).expand(len(a), -1, -1, -1)
        return self.out(self.blocks(self.lift(torch.cat([a.unsqueeze(-1), grid], -1)))).squeeze(-1)


def _sobolev(model: Any, b: Any) -> Tensor:
    """A relative norm, and the residual of Darcy's equation by differences."""
    u = model(b["a"])
    relative = ((u - b["u"]).flatten(1).norm(dim=1) / b["u"].flatten(1).norm(dim=1)).mean()
    du = torch.gradient(u, spacing=1 / 7, dim=(1, 2))
    flux = [b["a"].exp() * each for each in du]
    divergence = (
        torch.gradient(flux[0], spacing=1 / 7, dim=1)[0] + torch.gradient(flux[1], spacing=1 / 7, dim=2)[0]
    )
    return relative + 1e-4 * (divergence[:, 1:-1, 1:-1] + 1).square().mean()


def frequencies_mixed_by_blocks() -> Job:
    return job_of(Neural, _sobolev, FIELDS)


class Waves(nn.Module):
    """Random Fourier features, a learned slope of the activation, an output that holds the boundary exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(2, 4))
        self.layers = nn.ModuleList([nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, 1)])
        self.slope, self.diffusivity = nn.Parameter(torch.ones(2)), nn.Parameter(torch.tensor(-2.0))
        self.log_weights = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        p = torch.stack([x, t], -1) @ self.frequencies.to(x)
        h = torch.cat([p.sin(), p.cos()], -1)
        for i, layer in enumerate(self.layers[:-1]):
            h = torch.tanh(self.slope[i] * layer(h))
        return torch.sin(math.pi * x) + x * (1 - x) * t * self.layers[-1](h).squeeze(-1)


def _causal_residual(model: Any, b: Any) -> Tensor:
    """The equation's residual, later times weighted by how well earlier ones do; uncertainties weigh the terms; an unknown coefficient."""
    x, t = b["x"].clone().requires_grad_(True), b["t"].clone().requires_grad_(True)
    u = model(x, t)
    ones = torch.ones_like(u)
    u_t, u_x = torch.autograd.grad(u, (t, x), ones, create_graph=True)
    u_xx = torch.autograd.grad(u_x, x, ones, create_graph=True)[0]
    residual = (u_t + u * u_x - model.diffusivity.exp() * u_xx).square()
    order = t.detach().argsort()
    earlier = F.pad(residual[order].detach().cumsum(0)[:-1], (1, 0))
    weighted = (torch.exp(-0.5 * earlier) * residual[order]).mean()
    data = (u - torch.exp(-t) * torch.sin(math.pi * x)).square().mean()
    terms = torch.stack([weighted, data])
    return (0.5 * torch.exp(-model.log_weights) * terms + 0.5 * model.log_weights).sum()


def causal_weights_of_a_residual() -> Job:
    return job_of(Waves, _causal_residual, POINTS)


class Equivariant(nn.Module):
    """Scalars and vectors that talk by invariants only (PaiNN); energies add up, forces are their gradient."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, width)
        self.filters = nn.ModuleList([nn.Linear(5, 3 * width) for _ in range(2)])
        self.message = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 3 * width)) for _ in range(2)]
        )
        self.u, self.v = (
            nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(2)]) for _ in range(2)
        )
        self.update = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, 3 * width))
                for _ in range(2)
            ]
        )
        self.out = nn.Sequential(nn.Linear(width, 5), nn.SiLU(), nn.Linear(5, 1))

    def forward(self, z: Tensor, r: Tensor) -> Tensor:
        n = r.size(1)
        pair = r[:, None] - r[:, :, None]
        eye = torch.eye(n).to(r)
        distance = (pair.square().sum(-1) + eye).sqrt()
        direction = pair / distance.unsqueeze(-1)
        cutoff = 0.5 * (torch.cos(math.pi * distance / 4) + 1) * (distance < 4) * (1 - eye)
        rbf = torch.sin(distance.unsqueeze(-1) * torch.arange(1, 6).to(r) * math.pi / 4) / distance.unsqueeze(
            -1
        )
        s = self.embed(z)
        v = s.new_zeros(*s.shape, 3)
        for i in range(2):
            phi = self.message[i](s)[:, None] * self.filters[i](rbf) * cutoff.unsqueeze(-1)
            a, b, c = phi.chunk(3, -1)
            s = s + a.sum(2)
            v = v + torch.einsum("bijf,bjfd->bifd", b, v) + torch.einsum("bijf,bijd->bifd", c, direction)
            uv, vv = (torch.einsum("bifd,gf->bigd", v, each[i].weight) for each in (self.u, self.v))
            norm = (vv.square().sum(-1) + 1e-8).sqrt()
            a, b, c = self.update[i](torch.cat([s, norm], -1)).chunk(3, -1)
            s, v = s + a + c * (uv * vv).sum(-1), v + b.unsqueeze(-1) * uv
        return self.out(s).sum((1, 2))


def _energies_and_forces(model: Any, b: Any) -> Tensor:
    r = b["r"].detach().requires_grad_()
    energy = model(b["z"], r)
    (gradient,) = torch.autograd.grad(energy.sum(), r, create_graph=True)
    return F.huber_loss(energy, b["e"]) + 10 * (gradient + b["f"]).norm(dim=-1).mean()


def forces_of_vectors_and_scalars() -> Job:
    return job_of(Equivariant, _energies_and_forces, ATOMS)


class Spherical(nn.Module):
    """Harmonics to the second degree, coupled by constants kept in buffers (tensor field networks)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.radial, self.mix = (
            nn.Embedding(4, 4),
            nn.Sequential(nn.Linear(4, 9), nn.SiLU(), nn.Linear(9, 3 * 4)),
            nn.ParameterList([torch.randn(4, 4) * 0.5 for _ in range(3)]),
        )
        generator = torch.Generator().manual_seed(9)
        basis = torch.zeros(5, 3, 3)
        for i, (row, column) in enumerate([(0, 1), (1, 2), (0, 2)]):
            basis[i, row, column] = basis[i, column, row] = 2**-0.5
        basis[3] = torch.diag(torch.tensor([1.0, -1.0, 0.0])) * 2**-0.5
        basis[4] = torch.diag(torch.tensor([-1.0, -1.0, 2.0])) * 6**-0.5
        self.register_buffer("quadratic", basis)
        self.register_buffer("start", torch.randn(4, generator=generator))
        self.out = nn.Linear(12, 1)

    def forward(self, z: Tensor, r: Tensor) -> Tensor:
        pair = r[:, None] - r[:, :, None]
        eye = torch.eye(r.size(1)).to(r)
        distance = (pair.square().sum(-1) + eye).sqrt()
        unit = pair / distance.unsqueeze(-1)
        rbf = torch.exp(-(distance.unsqueeze(-1) - torch.linspace(0.5, 3.5, 4).to(r)).square()) * (
            1 - eye
        ).unsqueeze(-1)
        weights = self.radial(rbf).unflatten(-1, (3, 4)) * (1 - eye)[:, :, None, None]
        harmonics = [
            torch.ones_like(unit[..., :1]),
            unit,
            torch.einsum("kij,bnmi,bnmj->bnmk", self.quadratic.to(r), unit, unit),
        ]
        h = self.embed(z) + self.start.to(r)
        invariants = []
        for degree, (sphere, mix) in enumerate(zip(harmonics, self.mix, strict=True)):
            features = torch.einsum("bnmf,bnmk,bmf->bnfk", weights[..., degree, :], sphere, h)
            features = torch.einsum("bnfk,fg->bngk", features, mix)
            invariants.append(features.square().sum(-1).add(1e-6).sqrt() if degree else features.squeeze(-1))
        return self.out(torch.cat(invariants, -1)).sum((1, 2))


def harmonics_of_two_degrees() -> Job:
    return job_of(Spherical, lambda m, b: F.mse_loss(m(b["z"], b["r"]), b["e"]), ATOMS)


class Adjoint(torch.autograd.Function):
    """A solver whose gradient is a solver backwards; all that it needs is passed to it as tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, w2: Tensor, steps: int) -> Tensor:
        ctx.steps = steps
        with torch.no_grad():
            for _ in range(steps):
                x = x + torch.tanh(x @ w1) @ w2 / steps
        ctx.save_for_backward(x, w1, w2)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w1, w2 = ctx.saved_tensors
        g1, g2 = torch.zeros_like(w1), torch.zeros_like(w2)
        for _ in range(ctx.steps):
            h = torch.tanh(x @ w1)
            x = x - h @ w2 / ctx.steps
            back = (grad @ w2.T) * (1 - h**2) / ctx.steps
            g2 = g2 + h.T @ grad / ctx.steps
            g1 = g1 + x.T @ back
            grad = grad + back @ w1.T
        return grad, g1, g2, None


class Continuous(nn.Module):
    """Two such solvers around a jump, and a stochastic path with noise that the state scales."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(3, 9) * 0.4), nn.Parameter(torch.randn(9, 3) * 0.4)
        self.jump, self.noise = (
            nn.Linear(3, 3),
            nn.Sequential(nn.Linear(3, 6), nn.Softplus(), nn.Linear(6, 3), nn.Sigmoid()),
        )

    def forward(self, x: Tensor) -> Tensor:
        out = []
        for _ in range(5):
            x = Adjoint.apply(x, self.w1, self.w2, 4)
            x = x + 0.1 * self.noise(x) * torch.randn_like(x)
            out.append(x)
        return torch.stack(out, 1) + self.jump(x).unsqueeze(1)


def solvers_backwards() -> Job:
    return job_of(Continuous, lambda m, b: F.mse_loss(m(b["x0"]), b["x"]), PATHS)


class Sparse(nn.Module):
    """An autoencoder whose latent obeys a library of terms, those that are small being masked out by and by (SINDy)."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = (
            nn.Sequential(nn.Linear(3, 8), nn.Sigmoid(), nn.Linear(8, 2)),
            nn.Sequential(nn.Linear(2, 8), nn.Sigmoid(), nn.Linear(8, 3)),
        )
        self.xi = nn.Parameter(torch.randn(6, 2) * 0.3)
        self.register_buffer("mask", torch.ones(6, 2))

    @staticmethod
    def library(z: Tensor) -> Tensor:
        terms = [torch.ones_like(z[:, 0])] + [z[:, i] for i in range(2)]
        terms += [z[:, i] * z[:, j] for i in range(2) for j in range(i, 2)]
        return torch.stack(terms, -1)


def _dynamics(model: Any, b: Any) -> Tensor:
    x, dx = b["x"][:, 0], b["x"][:, 1] - b["x"][:, 0]
    z, dz = torch.func.jvp(model.enc, (x,), (dx,))
    if model.training:
        with torch.no_grad():
            model.mask.copy_((model.xi.abs() > 0.05).to(model.mask))
    predicted = model.library(z) @ (model.xi * model.mask.to(z))
    recon, back = torch.func.jvp(model.dec, (z,), (predicted,))
    return (
        F.mse_loss(recon, x)
        + 0.1 * F.mse_loss(predicted, dz)
        + 0.1 * F.mse_loss(back, dx)
        + 1e-3 * model.xi.abs().mean()
    )


def sparse_dynamics_of_a_latent() -> Job:
    return job_of(Sparse, _dynamics, PATHS)


class Branches(nn.Module):
    """Coefficients by an encoder of the function, modes by a network of places; a kernel integral between points (DeepONet, GNO)."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Conv2d(1, 5, 3, 2, 1), nn.GELU(), nn.Flatten(), nn.Linear(80, 12))
        self.trunk, self.kernel = (
            nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 12)),
            nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 1)),
        )
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, a: Tensor, where: Tensor) -> Tensor:
        modes = torch.einsum("bm,bpm->bp", self.branch(a.unsqueeze(1)), self.trunk(where)) + self.bias
        near = torch.cdist(where, where) < 0.6
        pairs = torch.cat(
            [
                where.unsqueeze(2).expand(-1, -1, where.size(1), -1),
                where.unsqueeze(1).expand(-1, where.size(1), -1, -1),
            ],
            -1,
        )
        kernel = self.kernel(pairs).squeeze(-1) * near
        return modes + torch.einsum("bij,bj->bi", kernel, modes) / near.sum(-1)


def _at_places(model: Any, b: Any) -> Tensor:
    where = torch.rand(len(b["a"]), 6, 2, dtype=b["a"].dtype)
    grid = (2 * where - 1).unsqueeze(1)
    truth = F.grid_sample(b["u"].unsqueeze(1), grid, align_corners=True).squeeze(1).squeeze(1)
    return F.mse_loss(model(b["a"], where), truth)


def functions_at_drawn_places() -> Job:
    return job_of(Branches, _at_places, FIELDS)
