"""Two losses that take turns: a critic and a generator (WGAN with a gradient penalty, Gulrajani et al., 2017), each
with an optimizer of its own parameters, learn the points of a ring.

    meshloom train examples/12_gan.py --plan dp=2
    meshloom verify examples/12_gan.py --plan dp=2,tp=2 --dtype float64
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import meshloom as ml

NOISE, HIDDEN = 4, 64


class GAN(nn.Module):
    """Points [2] from noise, and how real points look."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NOISE, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, 2))
        self.critic = nn.Sequential(
            nn.Linear(2, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, 1)
        )

    def fake(self, like: Tensor) -> Tensor:
        """As many points as `like` has."""
        return self.generator(torch.randn(len(like), NOISE, dtype=like.dtype, device=like.device))


def ring(num_samples: int, seed: int) -> TensorDataset:
    """Points near the unit circle."""
    generator = torch.Generator().manual_seed(seed)
    angle = 2 * torch.pi * torch.rand(num_samples, generator=generator)
    radius = 1 + 0.05 * torch.randn(num_samples, generator=generator)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1))


def critic_loss(model: GAN, batch: list[Tensor]) -> Tensor:
    """What the critic says of fake points, less what it says of real ones; its slope between them should be 1."""
    (real,) = batch
    fake = model.fake(real)
    between = torch.lerp(real, fake.detach(), torch.rand_like(real[:, :1])).requires_grad_()
    (slope,) = torch.autograd.grad(model.critic(between).sum(), between, create_graph=True)
    return (model.critic(fake) - model.critic(real)).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


def generator_loss(model: GAN, batch: list[Tensor]) -> Tensor:
    """The critic should take fake points for real ones."""
    return -model.critic(model.fake(batch[0])).mean()


def distance(model: GAN, batch: list[Tensor]) -> Tensor:
    """How far the generated points are from the circle."""
    return (model.fake(batch[0]).norm(dim=1) - 1).abs().mean()


def adam(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """With no momentum, as the paper has it."""
    return torch.optim.Adam(named, lr=1e-3, betas=(0.0, 0.9))


job = ml.Job(
    model=GAN,
    losses={
        "critic": ml.Objective(loss=critic_loss, optimizer=adam, parameters="critic", updates=3),
        "generator": ml.Objective(loss=generator_loss, optimizer=adam, parameters="generator"),
    },
    data=lambda: ring(1000, seed=1),
    batch_size=100,
    steps=300,
    evaluate=ml.Evaluate(lambda: ring(500, seed=2), {"distance": distance}, every=100),
)
