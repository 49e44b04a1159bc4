"""Models whose steps keep something besides what is trained: teachers, centres, codes, counts, targets."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from meshloom.core.buffer_rules import ema
from tests.equality.model import Model, Samples, normal, whole
from tests.equality.models.dense import own_loss


@torch.no_grad()
def follow(one: nn.Module, other: nn.Module) -> None:
    """The first moves a tenth of the way to the second."""
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        ours.mul_(0.9).add_(theirs, alpha=0.1)


class Followed(nn.Module):
    """Two views [batch, 7]: a teacher that follows the student reads the other view, less a centre that moves; the other samples are
    wrong answers."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(7, 11), nn.GELU(), nn.Linear(11, 6))
        self.predictor = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 6))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(6))
        self.centre: Tensor

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        found = self.predictor(self.student(batch["x"]))
        with torch.no_grad():
            taught = self.teacher(batch["noise"])
            wanted = ((taught - self.centre) / 0.3).softmax(-1)
            self.centre = self.centre * 0.9 + 0.1 * taught.mean(0)
            follow(self.teacher, self.student)
        scores = F.normalize(found, dim=-1) @ F.normalize(taught, dim=-1).T
        return (
            F.cross_entropy(2 * scores, torch.arange(len(scores)))
            - (wanted * found.log_softmax(-1)).sum(-1).mean()
        )


class Codes(nn.Module):
    """[batch, 8] -> reconstruction by codes that are moving averages of what is nearest to them; a histogram counts their use, and a
    multiplier that no gradient trains grows with the error."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 2 * 5)
        self.decoder = nn.Sequential(nn.Linear(10, 9), nn.GELU(), nn.Linear(9, 8))
        self.register_buffer("sums", torch.randn(7, 5))
        self.register_buffer("sizes", torch.ones(7))
        self.register_buffer("used", torch.zeros(7, dtype=torch.long))
        self.multiplier = nn.Parameter(torch.tensor(0.2), requires_grad=False)
        self.sums: Tensor
        self.sizes: Tensor
        self.used: Tensor

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        found = self.encoder(batch["x"]).view(-1, 5)
        codes = self.sums / self.sizes[:, None]
        nearest = torch.cdist(found, codes).argmin(-1)
        code = codes[nearest].detach()
        error = F.mse_loss(found, code)
        loss = F.mse_loss(self.decoder((found + (code - found).detach()).view(-1, 10)), batch["x"])
        loss = loss + self.multiplier.clone() * error
        with torch.no_grad():
            chosen = F.one_hot(nearest, 7).to(found.dtype)
            self.sizes.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(chosen.T @ found, alpha=0.1)
            self.used.scatter_add_(0, nearest, torch.ones_like(nearest))
            self.multiplier.add_(error - 0.5, alpha=0.1)
        return loss


class ActorCritic(nn.Module):
    """States [batch, 5], actions [batch, 2]: an actor that draws, of spectral norm, and a critic whose target follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(7, 10), nn.SiLU(), nn.Linear(10, 9), nn.SiLU(), nn.Linear(9, 1))
        self.actor = nn.Sequential(spectral_norm(nn.Linear(5, 9)), nn.Tanh(), nn.Linear(9, 4))
        self.target = copy.deepcopy(self.critic).requires_grad_(False)

    def drawn(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """An action of each, and the logarithm of its probability."""
        mean, spread = self.actor(state).chunk(2, dim=-1)
        chances = Normal(mean, F.softplus(spread) + 0.1)
        action = chances.rsample()
        return torch.tanh(action), chances.log_prob(action).sum(-1, keepdim=True)


def judge(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The critic's."""
    with torch.no_grad():
        action, chance = model.drawn(batch["noise"])
        later = model.target(torch.cat([batch["noise"], action], dim=-1)) - 0.1 * chance
        follow(model.target, model.critic)
    found = model.critic(torch.cat([batch["x"], batch["action"]], dim=-1))
    return F.smooth_l1_loss(found, batch["reward"] + 0.9 * later)


def act(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The actor's."""
    action, chance = model.drawn(batch["x"])
    return (0.1 * chance - model.critic(torch.cat([batch["x"], action], dim=-1))).mean()


def judge_and_act(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return judge(model, batch) + act(model, batch)


def views(count: int) -> Samples:
    return Samples(x=normal(120, count, 7), noise=normal(121, count, 7))


def codable(count: int) -> Samples:
    return Samples(x=normal(122, count, 8))


def transitions(count: int) -> Samples:
    return Samples(
        x=normal(123, count, 5),
        action=torch.tanh(normal(124, count, 2)),
        reward=whole(125, 3, count, 1).float(),
        noise=normal(126, count, 5),
    )


STATES = [
    Model(
        name="followed",
        interacts=True,
        features="a teacher and a centre that move, samples against each other",
        build=Followed,
        loss=own_loss,
        samples=views,
        several=True,
        stages=2,
        buffers={"teacher.*": ema(0.9), "centre": ema(0.9)},
    ),
    Model(
        name="codes",
        interacts=True,
        features="codes that move, counts and an untrained parameter that are summed",
        build=Codes,
        loss=own_loss,
        samples=codable,
        stages=2,
        buffers={"s*": ema(0.9), "used": "sum", "multiplier": "sum"},
    ),
    Model(
        name="actor_critic",
        interacts=True,
        features="a target that moves, spectral norm, distributions",
        build=ActorCritic,
        loss=judge_and_act,
        samples=transitions,
        stages=2,
        computed=True,
        buffers={"target.*": ema(0.9)},
    ),
]
