"""Probabilistic models: mixtures, Gaussian processes, weights with distributions, transport, forward algorithms."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import (  # fmt: skip
    Categorical,
    Dirichlet,
    Independent,
    MixtureSameFamily,
    NegativeBinomial,
    Normal,
    kl_divergence,
)
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal

XY = {"x": normal(141, 3), "y": normal(142), "count": integers(143, 9).float(), "label": integers(144, 4)}
CONTEXT = {"xc": normal(145, 5, 1), "yc": normal(146, 5, 1), "xt": normal(147, 7, 1), "yt": normal(148, 7, 1)}


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 11), nn.Tanh(), nn.Linear(11, 9), nn.Tanh(), nn.Linear(9, outputs))


class MDN(nn.Module):
    def __init__(self, parts: int = 3) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(3, 11), nn.Tanh(), nn.Linear(11, 9), nn.Tanh())
        self.pi, self.mu, self.sigma = nn.Linear(9, parts), nn.Linear(9, parts), nn.Linear(9, parts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.hidden(x)
        return F.softmax(self.pi(z), -1), torch.exp(self.sigma(z)), self.mu(z)


def _mixture(model: Any, b: Any) -> Tensor:
    pi, sigma, mu = model(b["x"])
    y = b["y"].unsqueeze(1).expand_as(sigma)
    ret = torch.exp(-0.5 * ((y - mu) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
    nll = -torch.log(torch.sum(ret * pi, dim=1) + 1e-10)
    if torch.isnan(nll).any() or torch.isinf(nll).any():
        print("the likelihood is not finite")
    return torch.mean(nll)


def mixture_density() -> Job:
    return job_of(MDN, _mixture, XY)


def _mixture_of_torch(model: Any, b: Any) -> Tensor:
    pi, sigma, mu = model(b["x"])
    mixture = MixtureSameFamily(Categorical(probs=pi), Normal(mu, sigma))
    return -mixture.log_prob(b["y"]).mean()


def mixture_of_distributions() -> Job:
    return job_of(MDN, _mixture_of_torch, XY)


class DeepKernel(nn.Module):
    """The marginal likelihood of a batch, by its Cholesky factor."""

    def __init__(self) -> None:
        super().__init__()
        self.features = mlp(3, 2)
        self.raw_noise, self.raw_length = nn.Parameter(torch.tensor(0.0)), nn.Parameter(torch.zeros(2))
        self.mean = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.features(x) / F.softplus(self.raw_length)
        K = torch.exp(-0.5 * torch.cdist(z, z).pow(2))  # noqa: N806
        K = K + (F.softplus(self.raw_noise) + 1e-3) * torch.eye(len(x), dtype=x.dtype)  # noqa: N806
        L = torch.linalg.cholesky(K)  # noqa: N806
        r = (y - self.mean).unsqueeze(1)
        alpha = torch.cholesky_solve(r, L)
        return (0.5 * (r * alpha).sum() + torch.log(torch.diagonal(L)).sum() + 0.5 * len(x) * math.log(2 * math.pi)) / len(x)  # fmt: skip


def deep_kernel() -> Job:
    return job_of(DeepKernel, lambda m, b: m(b["x"], b["y"]), XY)


class SparseGP(nn.Module):
    """Inducing points and a variational normal with a triangular factor."""

    def __init__(self) -> None:
        super().__init__()
        self.z, self.m = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.zeros(5))
        self.L, self.noise = nn.Parameter(torch.eye(5)), nn.Parameter(torch.tensor(-1.0))

    def kernel(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(-0.5 * ((a[:, None] - b[None]) ** 2).sum(-1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        Kzz = self.kernel(self.z, self.z) + 1e-4 * torch.eye(5, dtype=x.dtype)  # noqa: N806
        Lz = torch.linalg.cholesky(Kzz)  # noqa: N806
        A = torch.linalg.solve_triangular(Lz, self.kernel(self.z, x), upper=False)  # noqa: N806
        S = torch.tril(self.L)  # noqa: N806
        mean, var = A.t() @ self.m, 1 - (A**2).sum(0) + ((S.t() @ A) ** 2).sum(0)
        noise = self.noise.exp()
        fit = -0.5 * (math.log(2 * math.pi) + self.noise + ((y - mean) ** 2 + var) / noise)
        kl = 0.5 * ((S**2).sum() + (self.m**2).sum() - 5) - torch.log(torch.diagonal(S).abs() + 1e-9).sum()
        return -fit.mean() + kl / 24


def sparse_gaussian_process() -> Job:
    return job_of(SparseGP, lambda m, b: m(b["x"], b["y"]), XY)


class BayesLinear(nn.Module):
    """Weights drawn in every forward; what they cost is summed in attributes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight_mu, self.weight_rho = nn.Parameter(0.3 * torch.randn(outputs, inputs)), nn.Parameter(torch.full((outputs, inputs), -3.0))  # fmt: skip
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.log_prior: Any = 0
        self.log_posterior: Any = 0

    def forward(self, x: Tensor) -> Tensor:
        sigma = torch.log1p(torch.exp(self.weight_rho))
        epsilon = Normal(0, 1).sample(self.weight_mu.size()).to(x.dtype)
        weight = self.weight_mu + sigma * epsilon
        prior1, prior2 = (
            torch.exp(Normal(0.0, 1.0).log_prob(weight)),
            torch.exp(Normal(0.0, 0.1).log_prob(weight)),
        )
        self.log_prior = torch.log(0.5 * prior1 + 0.5 * prior2 + 1e-10).sum()
        self.log_posterior = (-0.5 * math.log(2 * math.pi) - torch.log(sigma) - epsilon**2 / 2).sum()
        return F.linear(x, weight, self.bias)


class BayesNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l1, self.l2 = BayesLinear(3, 9), BayesLinear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.l2(F.relu(self.l1(x))), dim=1)

    def sample_elbo(self, x: Tensor, y: Tensor, samples: int = 2) -> Tensor:
        outputs = torch.zeros(samples, x.size(0), 4, dtype=x.dtype)
        priors, posteriors = torch.zeros(samples, dtype=x.dtype), torch.zeros(samples, dtype=x.dtype)
        for i in range(samples):
            outputs[i] = self(x)
            priors[i] = self.l1.log_prior + self.l2.log_prior
            posteriors[i] = self.l1.log_posterior + self.l2.log_posterior
        return (posteriors.mean() - priors.mean()) / 24 + F.nll_loss(outputs.mean(0), y)


def bayes_by_backprop() -> Job:
    return job_of(BayesNet, lambda m, b: m.sample_elbo(b["x"], b["label"]), XY)


class Heteroscedastic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.p_logit = mlp(3, 2), nn.Parameter(torch.tensor(-1.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = torch.sigmoid(self.p_logit)
        u = torch.rand_like(x)
        drop = torch.sigmoid((torch.log(p + 1e-7) - torch.log(1 - p + 1e-7) + torch.log(u + 1e-7) - torch.log(1 - u + 1e-7)) / 0.1)  # fmt: skip
        return self.net(x * (1 - drop) / (1 - p)).unbind(-1)


def _gaussian(model: Any, b: Any) -> Tensor:
    mean, log_var = model(b["x"])
    return nn.GaussianNLLLoss(eps=1e-4)(mean, b["y"], log_var.exp()) + 1e-3 * model.p_logit**2


def concrete_dropout() -> Job:
    return job_of(Heteroscedastic, _gaussian, XY)


def _evidential(model: Any, b: Any) -> Tensor:
    gamma, v, alpha, beta = model(b["x"]).split(1, dim=-1)
    v, alpha, beta = F.softplus(v), F.softplus(alpha) + 1, F.softplus(beta)
    y = b["y"].unsqueeze(-1)
    two = 2 * beta * (1 + v)
    nll = 0.5 * torch.log(math.pi / v) - alpha * torch.log(two) + (alpha + 0.5) * torch.log(v * (y - gamma) ** 2 + two)  # fmt: skip
    nll = nll + torch.lgamma(alpha) - torch.lgamma(alpha + 0.5)
    return nll.mean() + 0.01 * (torch.abs(y - gamma) * (2 * v + alpha)).mean()


def evidential_regression() -> Job:
    return job_of(lambda: mlp(3, 4), _evidential, XY)


def _dirichlet(model: Any, b: Any) -> Tensor:
    alpha = F.relu(model(b["x"])) + 1
    y = F.one_hot(b["label"], 4).to(alpha.dtype)
    nll = (y * (torch.digamma(alpha.sum(1, keepdim=True)) - torch.digamma(alpha))).sum(1)
    other = y + (1 - y) * alpha
    kl = kl_divergence(Dirichlet(other), Dirichlet(torch.ones_like(other)))
    return (nll + 0.1 * kl).mean()


def evidential_classes() -> Job:
    return job_of(lambda: mlp(3, 4), _dirichlet, XY)


def _counts(model: Any, b: Any) -> Tensor:
    mu, theta = model(b["x"]).chunk(2, -1)
    mu, theta = F.softplus(mu).squeeze(-1) + 1e-6, F.softplus(theta).squeeze(-1) + 1e-6
    logits = (mu + 1e-8).log() - (theta + 1e-8).log()
    return -NegativeBinomial(total_count=theta, logits=logits).log_prob(b["count"]).mean()


def negative_binomial() -> Job:
    return job_of(lambda: mlp(3, 2), _counts, XY)


class NeuralProcess(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.latent, self.decoder = mlp(2, 7), nn.Linear(7, 8), mlp(5, 2)

    def encode(self, x: Tensor, y: Tensor) -> Independent:
        r = self.encoder(torch.cat([x, y], -1)).mean(1)
        mu, s = self.latent(torch.relu(r)).chunk(2, -1)
        return Independent(Normal(mu, 0.1 + 0.9 * torch.sigmoid(s)), 1)

    def forward(self, xc: Tensor, yc: Tensor, xt: Tensor, yt: Tensor) -> Tensor:
        prior, posterior = self.encode(xc, yc), self.encode(torch.cat([xc, xt], 1), torch.cat([yc, yt], 1))
        z = posterior.rsample().unsqueeze(1).repeat(1, xt.size(1), 1)
        mu, s = self.decoder(torch.cat([xt, z], -1)).chunk(2, -1)
        p = Normal(mu, 0.1 + 0.9 * F.softplus(s))
        return (-p.log_prob(yt).sum((1, 2)) + kl_divergence(posterior, prior)).mean()


def neural_process() -> Job:
    return job_of(NeuralProcess, lambda m, b: m(b["xc"], b["yc"], b["xt"], b["yt"]), CONTEXT)


class SinkhornDistance(nn.Module):
    """Iterates until what changed is small."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(1, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = self.net(x), self.net(y)
        C = torch.sum(torch.abs(x.unsqueeze(-2) - y.unsqueeze(-3)) ** 2, -1)  # noqa: N806
        mu = torch.empty(C.shape[:2], dtype=C.dtype).fill_(1.0 / C.shape[1])
        nu = torch.empty(C.shape[0], C.shape[2], dtype=C.dtype).fill_(1.0 / C.shape[2])
        u, v = torch.zeros_like(mu), torch.zeros_like(nu)
        M = lambda u, v: (-C + u.unsqueeze(-1) + v.unsqueeze(-2)) / 0.5  # noqa: E731, N806
        for _ in range(10):
            u1 = u
            u = 0.5 * (torch.log(mu + 1e-8) - torch.logsumexp(M(u, v), dim=-1)) + u
            v = 0.5 * (torch.log(nu + 1e-8) - torch.logsumexp(M(u, v).transpose(-2, -1), dim=-1)) + v
            err = (u - u1).abs().sum(-1).mean()
            if err.item() < 1e-1:
                break
        return torch.sum(torch.exp(M(u, v)) * C, dim=(-2, -1)).mean()


def sinkhorn_until_small() -> Job:
    return job_of(SinkhornDistance, lambda m, b: m(b["xc"], b["yt"]), CONTEXT)


class HMM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prior, self.trans, self.emit = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.randn(5, 9))  # fmt: skip

    def forward(self, x: Tensor, T: Tensor) -> Tensor:  # noqa: N803
        emit = F.log_softmax(self.emit, 1).transpose(0, 1)[x]
        log_a, log_alpha = (
            F.log_softmax(self.trans, 0),
            torch.zeros(x.size(0), x.size(1), 5, dtype=emit.dtype),
        )
        log_alpha[:, 0, :] = emit[:, 0] + F.log_softmax(self.prior, 0)
        for t in range(1, x.size(1)):
            log_alpha[:, t, :] = emit[:, t] + torch.logsumexp(
                log_a.unsqueeze(0) + log_alpha[:, t - 1].unsqueeze(1), 2
            )
        sums = log_alpha.logsumexp(dim=2)
        return -torch.gather(sums, 1, T.view(-1, 1) - 1).mean()


def hidden_markov() -> Job:
    return job_of(
        HMM, lambda m, b: m(b["x"], b["T"]), {"x": integers(149, 9, 6), "T": integers(150, 7, least=1)}
    )


def _mmd(model: Any, b: Any) -> Tensor:
    """Maximum mean discrepancy with kernels whose widths are those of the batch."""
    z = model(b["x"])
    total = torch.cat([z, torch.randn_like(z)], dim=0)
    n = total.size(0)
    l2 = ((total.unsqueeze(0) - total.unsqueeze(1)) ** 2).sum(2)
    width = torch.sum(l2.data) / (n**2 - n) / 4
    kernel: Any = sum(torch.exp(-l2 / (width * 2**i)) for i in range(5))
    h = n // 2
    return torch.mean(kernel[:h, :h] + kernel[h:, h:] - kernel[:h, h:] - kernel[h:, :h])


def maximum_mean_discrepancy() -> Job:
    return job_of(lambda: mlp(3, 4), _mmd, XY)
