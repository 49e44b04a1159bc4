"""Physics: derivatives inside losses, operators on spectra, solvers with fixed steps, equilibria."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import job_of, normal, uniform

POINTS = {"x": uniform(121, 1), "t": uniform(122, 1), "u": normal(123, 1)}
FIELDS = {"a": normal(124, 12), "u": normal(125, 12), "y": uniform(126, 12, 1)}
PHASE = {"q": normal(127, 3), "p": normal(128, 3), "dq": normal(129, 3), "dp": normal(130, 3)}


class Tanh(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(inputs, 11), nn.Linear(11, 9), nn.Linear(9, outputs)])

    def forward(self, *x: Tensor) -> Tensor:
        y = torch.cat(x, dim=1)
        for layer in self.layers[:-1]:
            y = torch.tanh(layer(y))
        return self.layers[-1](y)


def _burgers(model: Any, b: Any) -> Tensor:
    x, t = b["x"].requires_grad_(True), b["t"].requires_grad_(True)
    u = model(x, t)
    ones = torch.ones_like(u)
    u_t = torch.autograd.grad(u, t, grad_outputs=ones, retain_graph=True, create_graph=True)[0]
    u_x = torch.autograd.grad(u, x, grad_outputs=ones, retain_graph=True, create_graph=True)[0]
    u_xx = torch.autograd.grad(u_x, x, grad_outputs=ones, retain_graph=True, create_graph=True)[0]
    f = u_t + u * u_x - 0.01 * u_xx
    return torch.mean(f**2) + torch.mean((u - b["u"]) ** 2)


def burgers_pinn() -> Job:
    return job_of(lambda: Tanh(2, 1), _burgers, POINTS)


class Sine(nn.Module):
    def __init__(self, inputs: int, outputs: int, w0: float, first: bool) -> None:
        super().__init__()
        self.w0, self.linear = w0, nn.Linear(inputs, outputs)
        with torch.no_grad():
            bound = 1 / inputs if first else (6 / inputs) ** 0.5 / w0
            self.linear.weight.uniform_(-bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.w0 * self.linear(x))


def _laplace(model: Any, b: Any) -> Tensor:
    coords = torch.cat([b["x"], b["t"]], 1).clone().detach().requires_grad_(True)
    y = model(coords)
    grad = torch.autograd.grad(y, [coords], grad_outputs=torch.ones_like(y), create_graph=True)[0]
    div: Any = 0.0
    for i in range(grad.shape[-1]):
        div += torch.autograd.grad(grad[..., i], coords, torch.ones_like(grad[..., i]), create_graph=True)[0][..., i : i + 1]  # fmt: skip
    return ((div - b["u"]) ** 2).mean()


def siren_laplacian() -> Job:
    return job_of(lambda: nn.Sequential(Sine(2, 9, 3.0, True), Sine(9, 11, 3.0, False), nn.Linear(11, 1)), _laplace, POINTS)  # fmt: skip


def _hamilton(model: Any, b: Any) -> Tensor:
    q, p = b["q"].detach().requires_grad_(), b["p"].detach().requires_grad_()
    dq, dp = torch.autograd.grad(model(q, p).sum(), (q, p), create_graph=True)
    return F.mse_loss(dp, b["dq"]) + F.mse_loss(-dq, b["dp"])


def hamiltonian() -> Job:
    return job_of(lambda: Tanh(6, 1), _hamilton, PHASE)


def _lagrange(model: Any, b: Any) -> Tensor:
    """Accelerations from a Lagrangian's Hessian, by torch.func, sample by sample."""

    def lagrangian(q: Tensor, v: Tensor) -> Tensor:
        return model(q[None], v[None]).squeeze() + 0.5 * (v**2).sum()

    def acceleration(q: Tensor, v: Tensor) -> Tensor:
        hessian = torch.func.jacfwd(torch.func.grad(lagrangian, 1), 1)(q, v)
        force = torch.func.grad(lagrangian, 0)(q, v)
        mixed = torch.func.jacfwd(torch.func.grad(lagrangian, 1), 0)(q, v)
        return torch.linalg.solve(hessian + 0.1 * torch.eye(3, dtype=q.dtype), force - mixed @ v)

    return F.mse_loss(torch.func.vmap(acceleration)(b["q"], b["p"]), b["dp"])


def lagrangian() -> Job:
    return job_of(lambda: Tanh(6, 1), _lagrange, PHASE)


class SpectralConv1d(nn.Module):
    """Few modes of the spectrum, written into zeros."""

    def __init__(self, width: int, modes: int = 4) -> None:
        super().__init__()
        self.modes = modes
        scale = 1 / (width * width)
        self.weights1 = nn.Parameter(scale * torch.rand(width, width, modes, 2))

    def forward(self, x: Tensor) -> Tensor:
        batchsize = x.shape[0]
        x_ft = torch.fft.rfft(x)
        out_ft = torch.zeros(batchsize, x.size(1), x.size(-1) // 2 + 1, dtype=x_ft.dtype)
        weights = torch.view_as_complex(self.weights1)
        out_ft[:, :, : self.modes] = torch.einsum("bix,iox->box", x_ft[:, :, : self.modes], weights)
        return torch.fft.irfft(out_ft, n=x.size(-1))


class FNO(nn.Module):
    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.fc0, self.fc1 = nn.Linear(2, width), nn.Linear(width, 1)
        self.convs = nn.ModuleList([SpectralConv1d(width) for _ in range(2)])
        self.ws = nn.ModuleList([nn.Conv1d(width, width, 1) for _ in range(2)])

    def forward(self, a: Tensor, grid: Tensor) -> Tensor:
        x = self.fc0(torch.cat((a.unsqueeze(-1), grid), dim=-1)).permute(0, 2, 1)
        for conv, w in zip(self.convs, self.ws, strict=True):
            x = F.gelu(conv(x) + w(x))
        return self.fc1(x.permute(0, 2, 1)).squeeze(-1)


def _relative(y: Tensor, u: Tensor) -> Tensor:
    n = y.size(0)
    diff = torch.norm(y.reshape(n, -1) - u.reshape(n, -1), 2, 1)
    return torch.mean(diff / torch.norm(u.reshape(n, -1), 2, 1))


def fourier_operator() -> Job:
    return job_of(FNO, lambda m, b: _relative(m(b["a"], b["y"]), b["u"]), FIELDS)


class DeepONet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 7))
        self.trunk = nn.Sequential(nn.Linear(1, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh())
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, a: Tensor, y: Tensor) -> Tensor:
        return torch.einsum("bp,bnp->bn", self.branch(a), self.trunk(y)) + self.bias


def deep_o_net() -> Job:
    return job_of(DeepONet, lambda m, b: _relative(m(b["a"], b["y"]), b["u"]), FIELDS)


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 11), nn.Tanh(), nn.Linear(11, 3))
        self.nfe = 0

    def forward(self, t: float, y: Tensor) -> Tensor:
        self.nfe += 1
        return self.net(torch.cat([y, torch.full_like(y[:, :1], t)], 1))


def rk4(f: Any, y: Tensor, steps: int = 3) -> list[Tensor]:
    h, path = 1.0 / steps, [y]
    for i in range(steps):
        t = i * h
        k1 = f(t, y)
        k2 = f(t + h / 2, y + h / 2 * k1)
        k3 = f(t + h / 2, y + h / 2 * k2)
        k4 = f(t + h, y + h * k3)
        y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        path.append(y)
    return path


def neural_ode_with_fixed_steps() -> Job:
    """Its field counts how often it is called."""
    return job_of(Field, lambda m, b: F.mse_loss(rk4(m, b["q"])[-1], b["dq"]), PHASE)


class Augmented(nn.Module):
    """FFJORD: the trace of the field's Jacobian by noise."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 3))

    def forward(self, x: Tensor) -> Tensor:
        e = torch.randint(0, 2, x.shape).to(x.dtype) * 2 - 1
        log_det, z = torch.zeros(x.size(0), dtype=x.dtype), x.requires_grad_(True)
        for _ in range(2):
            dz = self.net(z)
            e_dzdx = torch.autograd.grad(dz, z, e, create_graph=True)[0]
            z, log_det = z + 0.5 * dz, log_det + 0.5 * (e_dzdx * e).sum(1)
        return -(torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(1) + log_det).mean()


def continuous_flow() -> Job:
    return job_of(Augmented, lambda m, b: m(b["q"].clone()), PHASE)


class DEQ(nn.Module):
    """A fixed point by iteration, its backward by another, in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.z, self.out = nn.Linear(3, 9), nn.Linear(9, 9), nn.Linear(9, 3)
        self.z.weight.data.mul_(0.3)

    def f(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.z(z) + self.x(x))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros(x.size(0), 9, dtype=x.dtype)
            for _ in range(8):
                z = self.f(z, x)
        z = self.f(z, x)
        z0 = z.clone().detach().requires_grad_()
        f0 = self.f(z0, x)

        def backward_hook(grad: Tensor) -> Tensor:
            g = grad
            for _ in range(6):
                g = torch.autograd.grad(f0, z0, g, retain_graph=True)[0] + grad
            return g

        if z.requires_grad:
            z.register_hook(backward_hook)
        return self.out(z)


def deep_equilibrium() -> Job:
    return job_of(DEQ, lambda m, b: F.mse_loss(m(b["q"]), b["dq"]), PHASE)


class Anderson(DEQ):
    """Iterates until the residual is small, and unrolls the last step alone."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z, res, k = torch.zeros(x.size(0), 9, dtype=x.dtype), 1.0, 0
            while res > 1e-3 and k < 20:
                new = self.f(z, x)
                res = ((new - z).norm() / (1e-5 + new.norm())).item()
                z, k = new, k + 1
        self.last_steps = k
        return self.out(self.f(z, x))


def fixed_point_by_tolerance() -> Job:
    return job_of(Anderson, lambda m, b: F.mse_loss(m(b["q"]), b["dq"]), PHASE)


class Potential(nn.Module):
    """Energies of pairs, forces as their negative gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(1, 9), nn.Softplus(), nn.Linear(9, 7), nn.Softplus(), nn.Linear(7, 1)
        )

    def forward(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        pos.requires_grad_(True)
        row, col = torch.triu_indices(4, 4, 1)
        d = (pos[:, row] - pos[:, col]).norm(dim=-1, keepdim=True)
        energy = self.net(d).sum((1, 2))
        forces = -torch.autograd.grad([energy.sum()], [pos], create_graph=self.training, retain_graph=True)[0]
        return energy, forces


def forces() -> Job:
    def loss(model: Any, b: Any) -> Tensor:
        e, f = model(b["pos"])
        return 0.01 * F.mse_loss(e, b["e"]) + 0.99 * F.mse_loss(f, b["f"])

    return job_of(Potential, loss, {"pos": normal(131, 4, 3), "e": normal(132), "f": normal(133, 4, 3)})


class Koopman(nn.Module):
    """A linear operator in a learnt space, its powers and eigenvalues in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 5))
        self.K, self.dec = (
            nn.Linear(5, 5, bias=False),
            nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3)),
        )
        U, _, V = torch.svd(self.K.weight.data)  # noqa: N806
        self.K.weight.data = torch.mm(U, V.t()) * 0.8

    def forward(self, path: Tensor) -> Tensor:
        z, loss = self.enc(path[:, 0]), 0.0
        for i in range(1, path.size(1)):
            z = self.K(z)
            loss = loss + F.mse_loss(self.dec(z), path[:, i]) + 0.3 * F.mse_loss(z, self.enc(path[:, i]))
        return loss + 1e-3 * torch.linalg.svdvals(self.K.weight).max()


def koopman() -> Job:
    return job_of(Koopman, lambda m, b: m(b["path"]), {"path": normal(134, 4, 3)})
