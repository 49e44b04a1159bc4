"""Estimation and dynamics: filters in loops, adaptive steps, implicit gradients, processes with kernels, bridges and sparse operators."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, stack_module_state, vmap
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import job_of, normal, sgd

SERIES = {"z": normal(381, 6, 3), "u": normal(382, 6, 2)}
XY = {"x": normal(383, 4), "y": normal(384, 2)}


class KalmanFilter(nn.Module):
    """Mean and covariance through time, gains by Cholesky factors, steps without an observation passed by."""

    def __init__(self, state: int = 4, observed: int = 3) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Parameter(torch.eye(state) + 0.1 * torch.randn(state, state)),
            nn.Parameter(0.3 * torch.randn(state, 2)),
        )
        self.net = nn.Sequential(nn.Linear(observed, 9), nn.Tanh(), nn.Linear(9, observed))
        self.c = nn.Parameter(torch.randn(observed, state) * 0.5)
        self.log_q, self.log_r = nn.Parameter(torch.zeros(state)), nn.Parameter(torch.zeros(observed))

    def forward(self, z: Tensor, u: Tensor) -> Tensor:
        n, t = z.shape[:2]
        mean, cov = z.new_zeros(n, self.a.size(0)), torch.eye(self.a.size(0)).to(z).repeat(n, 1, 1)
        q, r, total = torch.diag(self.log_q.exp()), torch.diag_embed(self.log_r.exp()), 0.0
        for i in range(t):
            mean = mean @ self.a.T + u[:, i] @ self.b.T
            cov = self.a @ cov @ self.a.T + q
            y = self.net(z[:, i])
            s = self.c @ cov @ self.c.T + r
            chol = torch.linalg.cholesky(s)
            innovation = y - mean @ self.c.T
            white = torch.linalg.solve_triangular(chol, innovation.unsqueeze(-1), upper=False).squeeze(-1)
            total = total + 0.5 * white.pow(2).sum(-1) + chol.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            gain = torch.cholesky_solve(self.c @ cov, chol).transpose(-1, -2)
            mean = mean + (gain @ innovation.unsqueeze(-1)).squeeze(-1)
            cov = (torch.eye(cov.size(-1)).to(cov) - gain @ self.c) @ cov
            cov = 0.5 * (cov + cov.mT)
        return (total / t + (self.net(z) - z).pow(2).mean((1, 2))).mean()


def deep_kalman_filter() -> Job:
    return job_of(KalmanFilter, lambda m, b: m(b["z"], b["u"]), SERIES, clip_grad_norm=10.0)


class ParticleFilter(nn.Module):
    """Particles that are weighed, and drawn again where the effective number is small."""

    def __init__(self, particles: int = 5) -> None:
        super().__init__()
        self.k = particles
        self.move = nn.Sequential(nn.Linear(3 + 2, 9), nn.ReLU(), nn.Linear(9, 6))
        self.weigh = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 1))

    def forward(self, z: Tensor, u: Tensor) -> Tensor:
        n = len(z)
        p, logw, loss = torch.randn(n, self.k, 3).to(z), torch.full((n, self.k), -math.log(self.k)).to(z), 0.0
        for t in range(z.size(1)):
            mean, logstd = self.move(torch.cat([p, u[:, t, None].expand(-1, self.k, -1)], -1)).chunk(2, -1)
            p = mean + torch.randn_like(mean) * logstd.clamp(-5, 1).exp()
            logw = logw + self.weigh(torch.cat([p, z[:, t, None].expand_as(p)], -1)).squeeze(-1)
            logw = logw - logw.logsumexp(1, keepdim=True)
            w = logw.exp()
            loss = loss + ((w.unsqueeze(-1) * p).sum(1) - z[:, t]).pow(2).mean()
            ess = 1.0 / w.pow(2).sum(1)
            for i in range(n):
                if ess[i] < self.k / 2:
                    index = torch.multinomial(w[i].detach(), self.k, replacement=True)
                    p = torch.cat([p[:i], p[i, index].unsqueeze(0), p[i + 1 :]])
                    logw = torch.cat(
                        [logw[:i], torch.full((1, self.k), -math.log(self.k)).to(z), logw[i + 1 :]]
                    )
        return loss / z.size(1)


def particle_filter() -> Job:
    return job_of(ParticleFilter, lambda m, b: m(b["z"], b["u"]), SERIES)


class AdaptiveODE(nn.Module):
    """Heun with Euler as its estimate of error: steps are taken or taken back as values say, and counted."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.enc, self.dec = (
            nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 6)),
            nn.Linear(4, 6),
            nn.Linear(6, 2),
        )
        self.nfe = 0

    def field(self, t: float, y: Tensor) -> Tensor:
        self.nfe += 1
        return self.f(y) * math.cos(t)

    def forward(self, x: Tensor) -> Tensor:
        y, t, h = self.enc(x), 0.0, 0.3
        while t < 1.0:
            h = min(h, 1.0 - t)
            k1 = self.field(t, y)
            k2 = self.field(t + h, y + h * k1)
            new = y + h / 2 * (k1 + k2)
            error = (
                (h / 2 * (k2 - k1) / (1e-2 + 1e-2 * torch.max(y.abs(), new.abs())))
                .pow(2)
                .mean()
                .sqrt()
                .item()
            )
            if error <= 1 or h < 0.02:
                t, y = t + h, new
            h = h * min(2.0, max(0.3, 0.9 * (1 / max(error, 1e-6)) ** 0.5))
        return self.dec(y)


def _regression(model: Any, b: Any) -> Tensor:
    return F.mse_loss(model(b["x"]), b["y"])


def ode_with_adaptive_steps() -> Job:
    return job_of(AdaptiveODE, _regression, XY)


class OdeintAdjoint(torch.autograd.Function):
    """The adjoint method: no state is kept; backward integrates state, adjoint and parameters' gradients in reverse."""

    @staticmethod
    def forward(ctx: Any, func: nn.Module, y0: Tensor, steps: int, *params: Tensor) -> Tensor:
        with torch.no_grad():
            y = y0
            for _ in range(steps):
                y = y + func(y) / steps
        ctx.func, ctx.steps = func, steps
        ctx.save_for_backward(y, *params)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        y, *params = ctx.saved_tensors
        a, gp = grad, [torch.zeros_like(p) for p in params]
        for _ in range(ctx.steps):
            with torch.enable_grad():
                yy = y.detach().requires_grad_(True)
                f = ctx.func(yy)
                gy, *g = torch.autograd.grad(f, (yy, *params), a, allow_unused=True)
            y = y - f.detach() / ctx.steps
            a = a + gy / ctx.steps
            gp = [s if d is None else s + d / ctx.steps for s, d in zip(gp, g, strict=True)]
        return None, a, None, *gp


class AdjointODE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.enc, self.dec = (
            nn.Sequential(nn.Linear(6, 13), nn.Softplus(), nn.Linear(13, 6)),
            nn.Linear(4, 6),
            nn.Linear(6, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.dec(OdeintAdjoint.apply(self.f, self.enc(x), 5, *self.f.parameters()))


def adjoint_ode() -> Job:
    return job_of(AdjointODE, _regression, XY)


class Implicit(nn.Module):
    """Solved without gradients until the residual is small; backward solves the adjoint equation in a tensor's hook."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u, self.head = nn.Linear(7, 7, bias=False), nn.Linear(4, 7), nn.Linear(7, 2)
        with torch.no_grad():
            self.w.weight.mul_(0.5)
        self.iterations = []

    def forward(self, x: Tensor) -> Tensor:
        f = lambda z: torch.tanh(self.w(z) + self.u(x))  # noqa: E731
        with torch.no_grad():
            z, n = torch.zeros(len(x), 7, dtype=x.dtype), 0
            while n < 100:
                new = f(z)
                done = (new - z).norm() < 1e-13 * (1 + new.norm())
                z, n = new, n + 1
                if done:
                    break
        self.iterations.append(n)
        z = f(z)
        if self.training and z.requires_grad:
            z0 = z.clone().detach().requires_grad_()
            f0 = f(z0)

            def backward_hook(grad: Tensor) -> Tensor:
                g = grad
                for _ in range(60):
                    g = torch.autograd.grad(f0, z0, g, retain_graph=True)[0] + grad
                return g

            z.register_hook(backward_hook)
        return self.head(z)


def implicit_layer_by_hook() -> Job:
    return job_of(Implicit, _regression, XY)


class ExactGP(nn.Module):
    """The marginal likelihood of the chunk's samples, which is no mean over samples, with a deep kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3))
        self.raw_length, self.raw_scale, self.raw_noise = (nn.Parameter(torch.zeros(1, 3)), nn.Parameter(torch.zeros(())), nn.Parameter(torch.tensor(-1.0)))  # fmt: skip

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.features(x) / F.softplus(self.raw_length)
        sq = z.pow(2).sum(-1, keepdim=True)
        d2 = (sq + sq.T - 2 * z @ z.T).clamp_min(0)
        k = F.softplus(self.raw_scale) * torch.exp(-0.5 * d2)
        k.diagonal().add_(F.softplus(self.raw_noise) + 1e-4)
        prior = torch.distributions.MultivariateNormal(
            torch.zeros(len(x), dtype=x.dtype), covariance_matrix=k
        )
        return -prior.log_prob(y.T).sum() / len(x)


def exact_gaussian_process() -> Job:
    return job_of(ExactGP, lambda m, b: m(b["x"], b["y"]), XY, batch_size=7)


class Ensemble(nn.Module):
    """Members stacked and mapped over; a prior of each that is not trained; disagreement is pushed up."""

    def __init__(self, members: int = 3) -> None:
        super().__init__()
        nets = [nn.Sequential(nn.Linear(4, 9), nn.ELU(), nn.Linear(9, 2)) for _ in range(members)]
        params, _ = stack_module_state(nets)
        self.params = nn.ParameterDict(
            {k.replace(".", "_"): nn.Parameter(v.detach()) for k, v in params.items()}
        )
        self.prior = nn.ModuleList([nn.Linear(4, 2) for _ in range(members)]).requires_grad_(False)
        self.__dict__["base"] = nets[0].to("meta")

    def forward(self, x: Tensor) -> Tensor:
        params = {k.replace("_", "."): v for k, v in self.params.items()}
        out = vmap(
            lambda p, x: functional_call(self.base, p, (x,)), in_dims=(0, None), randomness="different"
        )(params, x)
        return out + torch.stack([p(x) for p in self.prior])


def _ensemble(model: Any, b: Any) -> Tensor:
    out = model(b["x"])
    mask = torch.bernoulli(torch.full(out.shape[:2], 0.8)).to(out)
    return ((out - b["y"]).pow(2).mean(-1) * mask).mean() - 0.01 * out.var(0).mean()


def mapped_ensemble() -> Job:
    return job_of(Ensemble, _ensemble, XY)


class MetaSGD(nn.Module):
    """Learned rates of an inner step, a task for each sample, adapted weights in a call by functions."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 11), nn.ReLU(), nn.Linear(11, 9), nn.ReLU(), nn.Linear(9, 1))
        self.rates = nn.ParameterDict(
            {
                n.replace(".", "-"): nn.Parameter(torch.full_like(p, 0.05))
                for n, p in self.net.named_parameters()
            }
        )

    def forward(self, xs: Tensor, ys: Tensor, xq: Tensor, yq: Tensor) -> Tensor:
        total = 0.0
        for i in range(xs.size(0)):
            fast = dict(self.net.named_parameters())
            for _ in range(2):
                inner = F.mse_loss(functional_call(self.net, fast, (xs[i].unsqueeze(-1),)).squeeze(-1), ys[i])
                grads = torch.autograd.grad(inner, tuple(fast.values()), create_graph=True)
                fast = {
                    n: p - self.rates[n.replace(".", "-")] * g
                    for (n, p), g in zip(fast.items(), grads, strict=True)
                }
            total += F.mse_loss(functional_call(self.net, fast, (xq[i].unsqueeze(-1),)).squeeze(-1), yq[i])
        return total / xs.size(0)


def meta_sgd() -> Job:
    data = {name: normal(385 + i, 5) for i, name in enumerate(("xs", "ys", "xq", "yq"))}
    return job_of(MetaSGD, lambda m, b: m(b["xs"], b["ys"], b["xq"], b["yq"]), data, batch_size=7)


class Reptile(nn.Module):
    """A contractive autoencoder and a manifold: Jacobians by `jacrev` under `vmap`, their determinants, weights by Cayley's map."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = (
            nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3)),
            nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 4)),
        )
        self.skew = nn.Parameter(torch.randn(4, 4) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.skew.triu(1)
        a = a - a.T
        rot = torch.linalg.solve(torch.eye(4).to(a) + a, torch.eye(4).to(a) - a)
        x = x @ rot
        jac = vmap(jacrev(self.enc))(x)
        gram = jac @ jac.mT + 1e-2 * torch.eye(3).to(x)
        return (
            F.mse_loss(self.dec(self.enc(x)), x)
            + 0.1 * jac.pow(2).sum((1, 2)).mean()
            - 0.01 * torch.logdet(gram).mean()
        )


def jacobians_of_an_autoencoder() -> Job:
    return job_of(Reptile, lambda m, b: m(b["x"]), XY)


class SparseNet(nn.Module):
    """A sparse matrix that the forward makes from learned values at fixed places, and multiplies; a mask that prunes by size."""

    def __init__(self, inputs: int = 4, hidden: int = 11) -> None:
        super().__init__()
        self.register_buffer("indices", (torch.rand(hidden, inputs) < 0.5).nonzero().t().contiguous())
        self.values = nn.Parameter(torch.randn(self.indices.size(1)))
        self.shape, self.fc, self.threshold = (
            (hidden, inputs),
            nn.Linear(hidden, 2),
            nn.Parameter(torch.tensor(0.05)),
        )

    def forward(self, x: Tensor) -> Tensor:
        w = torch.sparse_coo_tensor(self.indices, self.values, self.shape)
        h = F.relu(torch.sparse.mm(w, x.t()).t())
        kept = torch.sigmoid((self.fc.weight.abs() - self.threshold) * 20)
        kept = kept + ((kept > 0.5).to(kept) - kept).detach()
        return F.linear(h, self.fc.weight * kept, self.fc.bias)


def sparse_weights() -> Job:
    return job_of(SparseNet, _regression, XY, optimizer=sgd)
