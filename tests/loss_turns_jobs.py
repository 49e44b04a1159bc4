"""Jobs of several losses, and the loop that each is on one device, written as people write it: plain torch, no
trainer, no ranks.

WGAN          a critic with its weights clipped, two updates a step; a generator every second step
WGAN-GP       a critic with a gradient penalty
actor-critic  a shared trunk that the actor's loss trains; the critic has a head alone
norms         batch norm in both, so that every loss writes buffers
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshloom as ml
from meshloom.core.plan_shares import chunk_sizes
from meshloom.core.random import (
    KeyedDraws,
    chunk_seed,
    model_seed,
    sample_order,
    seed_everything,
    seed_of_turn,
)

STEPS = 4
SAMPLES = 26  # batches of 7, 7, 7 and 5, or of 13 each


def data() -> list[dict[str, Tensor]]:
    """Odd sizes: 5 features, 3 actions."""
    made = torch.Generator().manual_seed(3)
    return [
        {
            "x": torch.randn(5, generator=made, dtype=torch.float64),
            "action": torch.randint(3, (), generator=made),
            "reward": torch.randn((), generator=made, dtype=torch.float64),
        }
        for _ in range(SAMPLES)
    ]


class Pair(nn.Module):
    """A generator and a critic of two layers each."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        middle = [nn.BatchNorm1d(7)] if norm else []
        # before batch norm a bias has no gradient but rounding
        self.generator = nn.Sequential(nn.Linear(3, 7, bias=not norm), *middle, nn.Tanh(), nn.Linear(7, 5))
        self.critic = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        self.double()

    def fake(self, like: Tensor) -> Tensor:
        return self.generator(torch.randn(len(like), 3, dtype=like.dtype))


class Agent(nn.Module):
    """Two heads on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh())
        self.actor = nn.Linear(7, 3)
        self.critic = nn.Linear(7, 1)
        self.double()


def critic_loss(model: Pair, batch: dict[str, Tensor]) -> Tensor:
    return model.critic(model.fake(batch["x"]).detach()).mean() - model.critic(batch["x"]).mean()


def generator_loss(model: Pair, batch: dict[str, Tensor]) -> Tensor:
    return -model.critic(model.fake(batch["x"])).mean()


def penalised_loss(model: Pair, batch: dict[str, Tensor]) -> Tensor:
    real, fake = batch["x"], model.fake(batch["x"]).detach()
    mixed = torch.lerp(real, fake, torch.rand(len(real), 1, dtype=real.dtype)).requires_grad_()
    (slope,) = torch.autograd.grad(model.critic(mixed).sum(), mixed, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square()
    return (model.critic(fake) - model.critic(real)).mean() + 10 * penalty.mean()


def actor_loss(model: Agent, batch: dict[str, Tensor]) -> Tensor:
    hidden = model.trunk(batch["x"])
    advantage = batch["reward"] - model.critic(hidden).squeeze(-1).detach()
    chosen = F.log_softmax(model.actor(hidden), -1).gather(-1, batch["action"][:, None]).squeeze(-1)
    return -(advantage * chosen).mean()


def value_loss(model: Agent, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model.critic(model.trunk(batch["x"]).detach()).squeeze(-1), batch["reward"])


def clipped(named: Any) -> torch.optim.Optimizer:
    """RMSprop, after which all weights lie within 0.1 (WGAN, Arjovsky et al., 2017, algorithm 1)."""
    optimizer = torch.optim.RMSprop(named, lr=1e-2)

    def clamp(stepped: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in stepped.param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(-0.1, 0.1)

    optimizer.register_step_post_hook(clamp)
    return optimizer


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(named, lr=1e-2, betas=(0.5, 0.9))


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "wgan": Pair,
    "penalty": Pair,
    "agent": Agent,
    "norms": lambda: Pair(norm=True),
}
LOSSES = {
    "wgan": {
        "critic": ml.Objective(loss=critic_loss, optimizer=clipped, parameters="critic", updates=2),
        "generator": ml.Objective(
            loss=generator_loss, optimizer=adam, parameters="generator", every=2, scheduler=halving
        ),
    },
    "penalty": {
        "critic": ml.Objective(loss=penalised_loss, optimizer=adam, parameters="critic", clip_grad_norm=0.5),
        "generator": ml.Objective(loss=generator_loss, optimizer=adam, parameters="generator"),
    },
    "agent": {
        "actor": ml.Objective(loss=actor_loss, optimizer=adam, parameters=["trunk", "actor"]),
        "critic": ml.Objective(
            loss=value_loss, optimizer=adam, parameters=lambda name: name.startswith("critic"), updates=3
        ),
    },
    "norms": {
        "critic": ml.Objective(loss=critic_loss, optimizer=adam, parameters="critic"),
        "generator": ml.Objective(loss=generator_loss, optimizer=adam, parameters="generator"),
    },
}


def batch_of(name: str) -> int:
    """Samples of a batch: batch norm needs two in every chunk."""
    return 13 if name == "norms" else 7


def turns_job(name: str, **settings: Any) -> ml.Job:
    """One of these jobs."""
    common = {"batch_size": batch_of(name), "steps": STEPS, "seed": 5, "losses": LOSSES[name]}
    given = {**common, "elementwise": True, **settings}  # of the hook that clips weights
    return ml.Job(model=MODELS[name], data=data, **given)


def one_device(name: str, num_chunks: Sequence[int]) -> Iterator[tuple[dict[str, float], nn.Module]]:
    """The newest loss of each, and the model, after every step of one device that runs the chunks one after another.
    num_chunks: of each step."""
    seed_everything(model_seed(5))
    model = MODELS[name]()
    samples, newest, size = data(), {}, batch_of(name)
    made = {}
    for loss, each in LOSSES[name].items():
        own = [parameter for known, parameter in model.named_parameters() if each.trains(known)]
        optimizer = each.optimizer(own)
        made[loss] = optimizer, own, each.scheduler(optimizer) if each.scheduler else None
    per_epoch = -(-SAMPLES // size)
    for step, chunks in enumerate(num_chunks):
        order = sample_order(5, step // per_epoch, SAMPLES, True)
        batch = [samples[number] for number in order[step % per_epoch * size :][:size]]
        draws = 0
        for loss, each in LOSSES[name].items():
            optimizer, own, scheduler = made[loss]
            for number in range(each.updates):
                if (step + 1) % each.every == 0:
                    model.zero_grad()
                    newest[loss] = _computed(model, each.loss, batch, chunks, step, draws + number)
                    if each.clip_grad_norm:
                        nn.utils.clip_grad_norm_(own, each.clip_grad_norm)
                    optimizer.step()
                    scheduler.step() if scheduler else None
            draws += each.updates
        yield dict(newest), model


def _computed(model: nn.Module, loss: Any, batch: list[Any], num_chunks: int, step: int, draws: int) -> float:
    total, start = 0.0, 0
    for index, size in enumerate(chunk_sizes(len(batch), num_chunks)):
        if not size:
            continue
        chunk = torch.utils.data.default_collate(batch[start : start + size])
        start += size
        seed_everything(seed_of_turn(chunk_seed(5, step, index), draws))
        with KeyedDraws(None, None):
            value = loss(model, chunk) * size / len(batch)
            value.backward()
        total += float(value.detach())
    return total


class Looking(nn.Module):
    """A table with sparse gradients, an actor and a critic on it, and a part that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 5, sparse=True)
        self.actor = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.critic = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        self.frozen = nn.Linear(5, 1).requires_grad_(False)
        self.double()


def sparse_job() -> ml.Job:
    """An agent that looks its observations up; the critic's loss trains the table, with SparseAdam."""

    def value(model: Looking, batch: dict[str, Tensor]) -> Tensor:
        seen = model.table(batch["row"])
        return F.mse_loss((model.critic(seen) + model.frozen(seen)).squeeze(-1), batch["reward"])

    def policy(model: Looking, batch: dict[str, Tensor]) -> Tensor:
        seen = model.table(batch["row"]).detach()
        return -(F.softmax(model.actor(seen), -1)[:, 0] * model.critic(seen).squeeze(-1)).mean()

    def two(named: Any) -> list[torch.optim.Optimizer]:
        tables = [each for name, each in named if name.startswith("table")]
        others = [each for name, each in named if not name.startswith("table")]
        return [torch.optim.SparseAdam(tables, lr=1e-2), adam(others)]

    losses = {
        "critic": ml.Objective(loss=value, optimizer=two, parameters=["table", "critic"]),
        "actor": ml.Objective(loss=policy, optimizer=adam, parameters="actor", every=2),
    }
    rows = torch.randint(11, (SAMPLES,), generator=torch.Generator().manual_seed(7))
    samples = [{"row": row, **each} for row, each in zip(rows, data(), strict=True)]
    return ml.Job(model=Looking, losses=losses, data=lambda: samples, batch_size=7, steps=STEPS)
