"""Jobs whose losses take gradients themselves, as papers and public repositories write them: two layers, odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.jobs import Samples

Loss = Callable[[Any, dict[str, Tensor]], Tensor]


def samples(*shape: int, classes: int = 5) -> Callable[[], Samples]:
    """Data of x [shape] and y, a class."""

    def build() -> Samples:
        source = torch.Generator().manual_seed(1)
        return Samples(
            x=torch.randn(18, *shape, generator=source), y=torch.randint(classes, (18,), generator=source)
        )

    return build


def mlp(inputs: int, outputs: int, activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 14), activation(), nn.Linear(14, 10), activation(), nn.Linear(10, outputs)
    )


# --- A heat equation: first and second derivatives by the inputs.


def heat(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x, t = (batch["x"][:, i : i + 1].clone().requires_grad_(True) for i in (0, 1))
    u = model(torch.cat([x, t], dim=1))
    ones = torch.ones_like(u)
    u_t = torch.autograd.grad(u, t, ones, create_graph=True)[0]
    u_x = torch.autograd.grad(u, x, ones, create_graph=True)[0]
    u_xx = torch.autograd.grad(u_x, x, ones, create_graph=True)[0]
    initial = model(torch.cat([x, torch.zeros_like(t)], 1)) - torch.sin(torch.pi * x)
    return ((u_t - 0.1 * u_xx) ** 2).mean() + (initial**2).mean()


# --- Forces are the negative gradient of an energy.


class Energy(nn.Module):
    """Positions [batch, atoms, 3] -> energies [batch], of distances between pairs of atoms."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = nn.Embedding(3, 6)
        self.first, self.second = nn.Linear(7, 11), nn.Linear(11, 1)
        self.register_buffer("kinds", torch.tensor([0, 1, 2, 1, 0]))

    def forward(self, positions: Tensor) -> Tensor:
        one, other = torch.triu_indices(5, 5, 1)
        distances = (positions[:, one] - positions[:, other]).pow(2).sum(-1, keepdim=True).add(0.1).sqrt()
        kinds = (self.kind(self.kinds[one]) * self.kind(self.kinds[other])).expand(len(positions), -1, -1)
        pairs = torch.cat([distances, kinds], -1)
        return self.second(F.silu(self.first(pairs))).sum((1, 2))


def forces(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    positions = batch["x"].detach().requires_grad_(True)
    energy = model(positions)
    (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=model.training)
    return F.mse_loss(energy, batch["y"].to(energy.dtype)) + 10 * F.l1_loss(-slope, batch["x"].tanh())


# --- A critic with the gradient penalty of WGAN-GP.


class Critic(nn.Module):
    """Images [batch, 3, 8, 8] -> scores [batch]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(6, 8, 4, 2, 1), nn.LayerNorm([8, 2, 2]), nn.LeakyReLU(0.2)
        )  # fmt: skip
        self.head = nn.Linear(32, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).flatten(1)).squeeze(1)


def penalty(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    real = batch["x"]
    fake = torch.randn_like(real)
    mixed = torch.rand(len(real), 1, 1, 1, dtype=real.dtype)
    between = (mixed * real + (1 - mixed) * fake).requires_grad_(True)
    scores = model(between)
    slope = torch.autograd.grad(
        scores, between, torch.ones_like(scores), create_graph=True, retain_graph=True
    )[0]
    norm = slope.flatten(1).norm(2, dim=1)
    return model(fake).mean() - model(real).mean() + 10 * ((norm - 1) ** 2).mean()


# --- Score matching, exact and sliced.


def score_matching(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x = batch["x"].clone().requires_grad_(True)
    score = torch.autograd.grad(-model(x).sum(), x, create_graph=True)[0]
    trace = sum(
        torch.autograd.grad(score[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(x.shape[1])
    )
    return (trace + 0.5 * score.pow(2).sum(1)).mean()


def sliced_score_matching(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x = batch["x"].clone().requires_grad_(True)
    direction = torch.randn_like(x).sign()
    score = model(x)
    along = torch.autograd.grad((score * direction).sum(), x, create_graph=True)[0]
    return ((along * direction).sum(1) + 0.5 * (score * direction).sum(1) ** 2).mean()


# --- An energy-based model whose negatives come from Langevin steps.


def langevin(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x = torch.rand_like(batch["x"])
    for _ in range(3):
        x = x.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(model(x).sum(), x)
        x = x - 0.05 * slope + 0.1 * torch.randn_like(x)
    positive, negative = model(batch["x"]), model(x.detach())
    return (positive - negative + 0.1 * (positive**2 + negative**2)).mean()


# --- MAML: one inner step for all, or for each task under vmap.


def maml(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x, y = batch["x"], batch["y"]
    parameters = dict(model.named_parameters())
    inner = F.cross_entropy(functional_call(model, parameters, (x[:, :4],)), y)
    slopes = torch.autograd.grad(inner, list(parameters.values()), create_graph=True)
    fast = {name: each - 0.1 * slope for (name, each), slope in zip(parameters.items(), slopes, strict=True)}
    return F.cross_entropy(functional_call(model, fast, (x[:, 3:],)), y)


def maml_of_tasks(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    parameters = dict(model.named_parameters())

    def of_task(x: Tensor, y: Tensor) -> Tensor:  # x [shots, features], y [shots]
        def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(functional_call(model, values, (x,)), y)

        slopes = grad(loss)(parameters, x[:3], y[:3])
        return loss({name: each - 0.1 * slopes[name] for name, each in parameters.items()}, x[3:], y[3:])

    return vmap(of_task)(batch["x"], batch["x"].sin().sum(-1, keepdim=True)).mean()


# --- A Hamiltonian network.


def hamiltonian(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    def energy(state: Tensor) -> Tensor:
        return model(state).squeeze()

    slopes = vmap(grad(energy))(batch["x"])
    of_q, of_p = slopes.chunk(2, dim=1)
    wanted = batch["x"].roll(3, 1).cos()
    return F.mse_loss(torch.cat([of_p, -of_q], 1), wanted)


# --- A continuous normalising flow: Euler steps, with the trace of the Jacobian.


def flow(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    z, change = batch["x"], torch.zeros(len(batch["x"]), dtype=batch["x"].dtype)
    for step in range(3):
        time = z.new_full((1,), step / 3)
        velocity = lambda z: model(torch.cat([z, time]))  # noqa: E731, B023
        traces = vmap(lambda z: torch.trace(jacrev(velocity)(z)))(z)  # noqa: B023
        z, change = z + vmap(velocity)(z) / 3, change - traces / 3
    return (0.5 * z.pow(2).sum(1) - change).mean()


class Regularised(nn.Module):
    """A convolutional classifier with dropout, batch norm and pooling, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.GELU(), nn.MaxPool2d(2))
        self.frozen = nn.Conv2d(6, 6, 1).requires_grad_(False)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(54, 5))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(F.softplus(self.frozen(self.stem(images))).flatten(1))


def adversarial(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Trains on the images and on images moved along the sign of the loss's gradient."""
    images = batch["x"].clone().requires_grad_(True)
    loss = F.cross_entropy(model(images), batch["y"])
    (slope,) = torch.autograd.grad(loss, images, retain_graph=True)
    return loss + F.cross_entropy(model((images + 0.1 * slope.sign()).detach()), batch["y"])


class Tokens(nn.Module):
    """Tokens [batch, 7] -> scores [batch, 5]: attention over an embedding that is also the last layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.norm, self.attention = nn.LayerNorm(8), nn.Linear(8, 24)
        self.out = nn.Linear(8, 13, bias=False)
        self.out.weight = self.embedding.weight
        self.noise: Tensor | None = None

    def forward(self, tokens: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        embedded = self.embedding(tokens)
        h = embedded if noise is None else embedded + noise
        q, k, v = (
            each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.attention(self.norm(h)).chunk(3, -1)
        )
        scores = torch.softmax(q @ k.transpose(-1, -2) / 2, -1)
        return self.out(h + (scores @ v).transpose(1, 2).flatten(2)).mean(1), embedded


def smoothed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Virtual adversarial noise on embeddings, with a penalty on the gradient by them."""
    tokens = batch["x"].abs().mul(4).long().clamp(max=12)
    scores, embedded = model(tokens)
    loss = F.cross_entropy(scores, batch["y"])
    (slope,) = torch.autograd.grad(loss, embedded, create_graph=True)
    noise = F.normalize(slope.detach(), dim=-1)
    return loss + slope.pow(2).sum() + F.cross_entropy(model(tokens, noise)[0], batch["y"])


class Equilibrium(nn.Module):
    """x [batch, 7] -> scores [batch, 5] of the z with z = f(z, x), whose backward is a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.inner, self.out = nn.Linear(7, 10), nn.Linear(10, 10), nn.Linear(10, 5)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(z) + self.given(x))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = x.new_zeros(len(x), 10)
            for _ in range(20):
                z = self.step(z, x)
        z = self.step(z, x)
        if self.training:
            fixed = z.clone().detach().requires_grad_()
            again = self.step(fixed, x)

            def backward_hook(gradient: Tensor) -> Tensor:
                found = gradient
                for _ in range(9):
                    found = torch.autograd.grad(again, fixed, found, retain_graph=True)[0] + gradient
                return found

            z.register_hook(backward_hook)
        return self.out(z)


def classified(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


JOBS: dict[str, tuple[Callable[[], nn.Module], Loss, Callable[[], Samples]]] = {
    "heat equation": (lambda: mlp(2, 1), heat, samples(2)),
    "forces": (Energy, forces, samples(5, 3)),
    "gradient penalty": (Critic, penalty, samples(3, 8, 8)),
    "score matching": (lambda: mlp(5, 1, nn.Softplus), score_matching, samples(5)),
    "sliced score matching": (lambda: mlp(7, 7, nn.SiLU), sliced_score_matching, samples(7)),
    "langevin": (lambda: mlp(7, 1, nn.ELU), langevin, samples(7)),
    "maml": (lambda: mlp(4, 5, nn.ReLU), maml, samples(7)),
    "maml of tasks": (lambda: mlp(3, 1), maml_of_tasks, samples(5, 3)),
    "hamiltonian": (lambda: mlp(6, 1), hamiltonian, samples(6)),
    "flow": (lambda: mlp(5, 4), flow, samples(4)),
    "adversarial images": (Regularised, adversarial, samples(3, 8, 8)),
    "equilibrium": (Equilibrium, classified, samples(7)),
    "smoothed tokens": (Tokens, smoothed, samples(7)),
}


def gradient_job(name: str, **settings: Any) -> Job:
    """The job of this name in `JOBS`."""
    model, loss, data = JOBS[name]
    return Job(
        **{
            "model": model,
            "loss": loss,
            "data": data,
            "optimizer": lambda named: torch.optim.SGD([each for _, each in named], lr=0.05),
            "batch_size": 9,
            "steps": 2,
            **settings,
        }
    )
