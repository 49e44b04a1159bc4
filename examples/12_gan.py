"""Two losses that take turns, in a loop of one's own: a critic and a generator (WGAN with a gradient penalty, Gulrajani et al.,
2017), each a parallel module with an optimizer of its own, learn the points of a ring.

    python examples/12_gan.py                         # one process
    meshloom run    examples/12_gan.py --plan dp=2
    meshloom verify examples/12_gan.py --plan dp=2

Words of its own stand behind --: `-- --epochs 3`.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshloom as ml

NOISE, HIDDEN, BATCH, CRITIC_STEPS = 4, 64, 100, 3


def generator() -> nn.Module:
    """Points [batch, 2] of noise [batch, 4]."""
    return nn.Sequential(nn.Linear(NOISE, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, 2))


def critic() -> nn.Module:
    """How real points [batch, 2] look, [batch, 1]."""
    return nn.Sequential(
        nn.Linear(2, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, 1)
    )


def ring(num_samples: int) -> TensorDataset:
    """Points near the unit circle."""
    angle = 2 * torch.pi * torch.rand(num_samples)
    radius = 1 + 0.05 * torch.randn(num_samples)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1))


def noise() -> Tensor:
    """This replica's share of what is drawn for a batch."""
    return ml.share(torch.randn(BATCH, NOISE))


def critic_loss(critic: nn.Module, real: Tensor, fake: Tensor, where: Tensor) -> Tensor:
    """What the critic says of fake points, less what it says of real ones; its slope between them should be 1."""
    between = torch.lerp(real, fake, where).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (critic(fake) - critic(real)).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--epochs", type=int, default=30)
    given = words.parse_args()

    torch.manual_seed(0)
    data = DataLoader(ring(1000), BATCH, shuffle=True, drop_last=True)
    loader = ml.loader(data)
    made, judged = ml.parallel(generator()), ml.parallel(critic())
    generating = torch.optim.Adam(made.parameters(), lr=1e-3, betas=(0.0, 0.9))  # with no momentum
    judging = torch.optim.Adam(judged.parameters(), lr=1e-3, betas=(0.0, 0.9))
    for epoch in range(given.epochs):
        for (real,) in loader:
            judged.requires_grad_(True)
            for _ in range(CRITIC_STEPS):
                fake, where = made(noise()).detach(), ml.share(torch.rand(BATCH, 1))
                judging.zero_grad()
                critic_loss(judged, real, fake, where).backward()
                judging.step()
            judged.requires_grad_(False)  # its gradients are neither computed nor sent here
            generating.zero_grad()
            loss = -judged(made(noise())).mean()
            loss.backward()
            generating.step()
        with torch.no_grad():
            distance = float(ml.mean((made(noise()).norm(dim=1) - 1).abs().mean()))
        if ml.main and (epoch + 1) % 10 == 0:
            print(f"epoch {epoch + 1}  generated points are {distance:.3f} from the circle")


if __name__ == "__main__":
    main()
