"""Sciences: proteins with recycling, electrons, particles, private gradients, flow networks, memories of a temporal graph."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal, sgd


class Triangle(nn.Module):
    """Triangle multiplication of pairs, with gates and rows that are dropped together."""

    def __init__(self, pairs: int = 6) -> None:
        super().__init__()
        self.norm, self.out_norm = nn.LayerNorm(pairs), nn.LayerNorm(pairs)
        self.left, self.right, self.gate, self.out = (nn.Linear(pairs, pairs) for _ in range(4))

    def forward(self, z: Tensor) -> Tensor:
        normed = self.norm(z)
        a, b = self.left(normed), self.right(normed)
        x = torch.einsum("bikc,bjkc->bijc", a, b)
        x = self.out(self.out_norm(x)) * torch.sigmoid(self.gate(normed))
        keep = F.dropout(torch.ones_like(x[:, :, :1, :1]), 0.25, self.training)
        return z + keep * x


class Folding(nn.Module):
    """The trunk runs a drawn number of times; what it made is fed back, and only the last time has gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(7, 6), nn.Embedding(9, 6)
        self.back, self.blocks = nn.LayerNorm(6), nn.ModuleList([Triangle(), Triangle()])
        self.bins = nn.Linear(6, 5)

    def forward(self, residues: Tensor) -> Tensor:
        length = residues.shape[1]
        offset = (torch.arange(length)[:, None] - torch.arange(length)).clamp(-4, 4) + 4
        e = self.embed(residues)
        start = e[:, :, None] + e[:, None] + self.position(offset)
        z = torch.zeros_like(start)
        cycles = random.randint(1, 3)
        for cycle in range(cycles):
            with torch.set_grad_enabled(cycle == cycles - 1):
                z = start + self.back(z.detach())
                for block in self.blocks:
                    z = block(z)
        return self.bins(z + z.transpose(1, 2))


def folding_with_recycling() -> Job:
    data = {"x": integers(601, 7, 6), "y": integers(602, 5, 6, 6)}
    return job_of(Folding, lambda m, b: F.cross_entropy(m(b["x"]).flatten(0, 2), b["y"].flatten()), data)


class Electrons(nn.Module):
    """Determinants of orbitals; log|psi| by slogdet."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 9), nn.Linear(9, 9)
        self.orbitals = nn.Linear(9, 2 * 3)
        self.decay = nn.Parameter(torch.ones(2, 3))

    def forward(self, r: Tensor) -> Tensor:
        """r: [3, 3], electrons in space; log|psi|, []"""
        distance = torch.sqrt((r**2).sum(-1, keepdim=True) + 1e-4)
        h = torch.tanh(self.one(torch.cat([r, distance], -1)))
        h = torch.tanh(self.two(h + h.mean(0, keepdim=True))) + h
        phi = self.orbitals(h).view(3, 2, 3).transpose(0, 1) * torch.exp(-self.decay[:, None] * distance)
        sign, log = torch.linalg.slogdet(phi)
        top = log.max().detach()
        return top + torch.log(torch.abs((sign * torch.exp(log - top)).sum()) + 1e-12)


def _energy(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Local energies by second derivatives along unit vectors, clipped about the median; the gradient of the score."""
    parameters = dict(model.named_parameters())

    def psi(r: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (r.view(3, 3),))

    def local(r: Tensor) -> Tensor:
        gradient = torch.func.grad(psi)
        eye = torch.eye(9, dtype=r.dtype)
        second = torch.stack([torch.func.jvp(gradient, (r,), (e,))[1] @ e for e in eye]).sum()
        potential = -2 / torch.sqrt((r.view(3, 3) ** 2).sum(-1) + 1e-2)
        return -0.5 * (second + (gradient(r) ** 2).sum()) + potential.sum()

    r = batch["r"].flatten(1)
    energies = torch.func.vmap(local)(r).detach()
    middle = energies.median()
    spread = (energies - middle).abs().mean()
    energies = torch.clamp(energies, middle - 5 * spread, middle + 5 * spread)
    return 2 * ((energies - energies.mean()) * torch.func.vmap(psi)(r)).mean()


def electrons_by_determinants() -> Job:
    return job_of(Electrons, _energy, {"r": normal(611, 3, 3)})


def _private(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Gradients of each sample, clipped, with noise, handed on as those of a sum that is linear in the parameters."""
    parameters = dict(model.named_parameters())

    def alone(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, p, (x[None],)), y[None])

    fixed = {name: each.detach() for name, each in parameters.items()}
    each, losses = torch.func.vmap(torch.func.grad_and_value(alone), in_dims=(None, 0, 0))(
        fixed, batch["x"], batch["y"]
    )
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
    factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
    total = batch["x"].new_zeros(())
    for name, gradient in each.items():
        clipped = torch.einsum("b,b...->...", factor, gradient)
        noisy = clipped + 0.1 * torch.randn_like(clipped)
        total = total + (parameters[name] * noisy).sum()
    return total - total.detach() + losses.sum().detach(), len(batch["x"])


def private_gradients() -> Job:
    return job_of(
        lambda: nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5)),
        _private,
        {"x": normal(621, 7), "y": integers(622, 5)},
        optimizer=sgd,
    )


class Particles(nn.Module):
    def __init__(self, count: int = 12, dim: int = 6) -> None:
        super().__init__()
        self.particles = nn.Parameter(torch.randn(count, dim))


def _stein(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Regression's posterior by particles that repel each other; the kernel's width by the median distance."""
    x = model.particles
    wanted = x.detach().requires_grad_(True)
    error = batch["x"] @ wanted[:, :-1].T + wanted[:, -1] - batch["y"][:, None]
    log_posterior = -(error**2).mean(0) - 0.01 * (wanted**2).sum(-1)
    (score,) = torch.autograd.grad(log_posterior.sum(), wanted)
    squares = torch.cdist(wanted, wanted.detach()) ** 2
    width = squares.detach().median() / math.log(len(x) + 1)
    kernel = torch.exp(-squares / (width + 1e-6))
    (repulsion,) = torch.autograd.grad(kernel.sum(), wanted)
    direction = (kernel.detach() @ score - repulsion) / len(x)
    return -(x * direction.detach()).sum()


def stein_particles() -> Job:
    return job_of(Particles, _stein, {"x": normal(631, 5), "y": normal(632)})


class FlowPolicy(nn.Module):
    """Builds bit strings one by one; the partition function is a parameter of no dims."""

    def __init__(self, bits: int = 5) -> None:
        super().__init__()
        self.bits, self.log_z = bits, nn.Parameter(torch.tensor(0.0))
        self.net = nn.Sequential(nn.Linear(2 * bits, 13), nn.LeakyReLU(), nn.Linear(13, 2 * bits))

    def forward(self, count: int) -> tuple[Tensor, Tensor]:
        state = self.log_z.new_zeros(count, self.bits, 2)
        total = self.log_z.expand(count)
        for _ in range(self.bits):
            logits = self.net(state.flatten(1)).view(count, self.bits, 2)
            logits = logits.masked_fill(state.sum(-1, keepdim=True) > 0, -math.inf).flatten(1)
            policy = torch.distributions.Categorical(logits=logits)
            action = policy.sample()
            total = total + policy.log_prob(action)
            state = state + F.one_hot(action, 2 * self.bits).to(state).view_as(state)
        return total, state


def _balance(model: Any, batch: dict[str, Tensor]) -> Tensor:
    forward, state = model(len(batch["w"]))
    reward = (state[..., 1] * batch["w"]).sum(-1) - math.log(math.factorial(model.bits))
    return ((forward - reward) ** 2).mean()


def _rates(named: Any) -> torch.optim.Optimizer:
    named = list(named)
    rest = [each for name, each in named if name != "log_z"]
    return torch.optim.Adam(
        [{"params": rest}, {"params": [dict(named)["log_z"]], "lr": 0.1, "betas": (0.5, 0.9)}], lr=1e-2
    )


def trajectory_balance() -> Job:
    return job_of(FlowPolicy, _balance, {"w": normal(641, 5)}, optimizer=_rates)


class TemporalGraph(nn.Module):
    """A memory of nodes: messages of a batch are read with the memory before it, the newest of each node is kept."""

    def __init__(self, nodes: int = 9, dim: int = 6) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(nodes, dim))
        self.register_buffer("last", torch.zeros(nodes))
        self.update, self.time = nn.GRUCell(2 * dim + 3 + dim, dim), nn.Linear(1, dim)
        self.link = nn.Sequential(nn.Linear(2 * dim, 11), nn.ReLU(), nn.Linear(11, 1))
        self.start = nn.Embedding(nodes, dim)

    def forward(self, source: Tensor, target: Tensor, when: Tensor, features: Tensor) -> Tensor:
        memory = self.memory + self.start.weight
        nodes = torch.cat([source, target])
        others = torch.cat([target, source])
        gap = torch.cat([when, when]) - self.last[nodes]
        message = torch.cat(
            [
                memory[nodes],
                memory[others],
                torch.cat([features, features]),
                torch.cos(self.time(gap[:, None])),
            ],
            -1,
        )
        new = self.update(message, memory[nodes])
        unique, inverse = nodes.unique(return_inverse=True)
        newest = torch.zeros(len(unique), dtype=torch.long).scatter_reduce(
            0, inverse, torch.arange(len(nodes)), "amax", include_self=False
        )
        current = memory.index_copy(0, unique, new[newest])
        with torch.no_grad():
            self.memory[unique] = new[newest].detach()
            self.last[unique] = torch.cat([when, when])[newest]
        wrong = torch.randint(0, len(self.memory), target.shape)
        scores = [
            self.link(torch.cat([current[source], current[each]], -1)).squeeze(-1) for each in (target, wrong)
        ]
        return torch.stack(scores)


def _links(model: Any, b: dict[str, Tensor]) -> Tensor:
    right, wrong = model(b["source"], b["target"], b["when"], b["features"])
    return F.softplus(-right).mean() + F.softplus(wrong).mean()


def temporal_graph_with_memory() -> Job:
    data = {
        "source": integers(651, 9), "target": integers(652, 9), "when": normal(653).abs().cumsum(0), "features": normal(654, 3),
    }  # fmt: skip
    return job_of(TemporalGraph, _links, data)
