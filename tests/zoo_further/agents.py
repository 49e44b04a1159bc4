"""Reinforcement: epochs and minibatches inside a loss, targets, imagined rollouts, options, teams and imitators."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Beta, Categorical, Normal, kl_divergence
from torch.nn import functional as F

import meshloom as ml
from meshloom.core.job import Job
from tests.zoo import adam, integers, job_of, normal, uniform

TRANSITIONS = {
    "s": normal(551, 5),
    "a": integers(552, 3),
    "r": normal(553),
    "s2": normal(554, 5),
    "done": (uniform(555) < 0.2).long(),
}
ROLLOUT = {
    "s": normal(556, 6, 5),
    "a": integers(557, 3, 6),
    "r": normal(558, 6),
    "logp": -uniform(559, 6) - 0.4,
    "done": (uniform(560, 6) < 0.2),
}
CONTROL = {"s": normal(561, 5), "a": uniform(562, 2) * 1.8 - 0.9, "r": normal(563), "s2": normal(564, 5)}


def net(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in pairwise(sizes):
        layers += [nn.Linear(i, o), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.pi, self.v = net(5, 11, 9), nn.Linear(9, 3), nn.Linear(9, 1)

    def forward(self, s: Tensor) -> tuple[Categorical, Tensor]:
        h = torch.tanh(self.body(s))
        return Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)


@torch.no_grad()
def _advantages(r: Tensor, v: Tensor, done: Tensor) -> Tensor:
    last, out = torch.zeros_like(r[:, 0]), torch.zeros_like(r)
    for t in reversed(range(r.size(1))):
        following = v[:, t + 1] if t + 1 < r.size(1) else torch.zeros_like(v[:, t])
        alive = 1.0 - done[:, t].to(r)
        last = r[:, t] + 0.9 * following * alive - v[:, t] + 0.9 * 0.95 * alive * last
        out[:, t] = last
    return out


def _minibatches(model: Any, b: Any) -> Tensor:
    """Advantages once, then minibatches in a drawn order, each clipped and with an entropy bonus."""
    with torch.no_grad():
        _, v = model(b["s"])
    advantage = _advantages(b["r"], v, b["done"])
    flat = {
        k: x.flatten(0, 1)
        for k, x in {
            "s": b["s"],
            "a": b["a"],
            "logp": b["logp"],
            "adv": advantage,
            "ret": advantage + v,
            "v": v,
        }.items()
    }
    total: Any = 0
    order = torch.randperm(flat["a"].numel())
    for rows in order.chunk(3):
        dist, value = model(flat["s"][rows])
        adv = flat["adv"][rows]
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        ratio = (dist.log_prob(flat["a"][rows]) - flat["logp"][rows]).exp()
        surrogate = torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
        clipped = flat["v"][rows] + (value - flat["v"][rows]).clamp(-0.2, 0.2)
        v_loss = 0.5 * torch.max((value - flat["ret"][rows]) ** 2, (clipped - flat["ret"][rows]) ** 2).mean()
        with torch.no_grad():
            model.approx_kl = ((ratio - 1) - ratio.log()).mean().item()
        total = total + v_loss - surrogate - 0.01 * dist.entropy().mean()
    return total / 3


def minibatches_in_a_drawn_order() -> Job:
    return job_of(ActorCritic, _minibatches, ROLLOUT)


class WithTarget(nn.Module):
    """A target that is copied anew every second forward, as a counter in a buffer says."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = net(5, 12, 10, 3), net(5, 12, 10, 3)
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def sync(self) -> None:
        self.updates += 1
        due = (self.updates % 2 == 0).to(torch.get_default_dtype())
        for p, q in zip(self.target.parameters(), self.online.parameters(), strict=True):
            p.copy_(torch.lerp(p, q, due.to(p)))


def _munchausen(model: Any, b: Any) -> Tensor:
    """Soft targets with the log policy in the reward, and a conservative term (M-DQN, CQL)."""
    q = model.online(b["s"])
    with torch.no_grad():
        following = model.target(b["s2"])
        logp = F.log_softmax(following / 0.3, -1)
        soft = (logp.exp() * (following - 0.3 * logp)).sum(-1)
        bonus = (
            F.log_softmax(model.target(b["s"]) / 0.3, -1).gather(1, b["a"][:, None]).squeeze(1).clamp(-1, 0)
        )
        y = b["r"] + 0.27 * bonus + 0.99 * (1 - b["done"]) * soft
    chosen = q.gather(1, b["a"][:, None]).squeeze(1)
    loss = F.huber_loss(chosen, y) + 0.5 * (torch.logsumexp(q, -1) - chosen).mean()
    model.sync()
    return loss


def soft_targets_copied_at_times() -> Job:
    return job_of(WithTarget, _munchausen, TRANSITIONS, optimizer=adam)


class Latent(nn.Module):
    """Rolls out in a latent, plans with an ensemble, consistency with a moving copy (TD-MPC)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.dynamics, self.reward = net(5, 10, 8), net(10, 10, 8), net(10, 9, 1)
        self.qs, self.pi = nn.ModuleList([net(10, 9, 1) for _ in range(3)]), net(8, 9, 2)
        self.moving = copy.deepcopy(self.encoder).requires_grad_(False)

    def simnorm(self, z: Tensor) -> Tensor:
        return z.view(*z.shape[:-1], -1, 4).softmax(-1).flatten(-2)


def _latent_loss(model: Any, b: Any) -> Tensor:
    with torch.no_grad():
        for old, new in zip(model.moving.parameters(), model.encoder.parameters(), strict=True):
            old.lerp_(new, 0.05)
        targets = model.simnorm(model.moving(b["s"][:, 1:]))
    z, loss, rho = model.simnorm(model.encoder(b["s"][:, 0])), 0.0, 1.0
    actions = F.one_hot(b["a"], 3).to(z)[..., :2]
    for t in range(b["s"].size(1) - 1):
        za = torch.cat([z, actions[:, t]], -1)
        picked = torch.randint(0, 3, (2,))
        values = torch.stack([q(za) for q in model.qs])[picked].min(0).values.squeeze(-1)
        pi = torch.tanh(model.pi(z.detach()) + 0.1 * torch.randn(2, dtype=z.dtype))
        loss = loss + rho * (
            F.mse_loss(model.reward(za).squeeze(-1), b["r"][:, t]) + F.mse_loss(values, b["r"][:, t:].sum(1))
        )
        loss = loss + 1e-2 * pi.pow(2).mean()
        z = model.simnorm(model.dynamics(za))
        loss, rho = loss + 2 * rho * F.mse_loss(z, targets[:, t]), rho * 0.5
    return loss / b["s"].size(1)


def rollouts_in_a_latent() -> Job:
    return job_of(Latent, _latent_loss, ROLLOUT)


class SquashedActor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.q, self.log_alpha = net(5, 11, 4), net(7, 11, 2), nn.Parameter(torch.zeros(()))
        self.target = copy.deepcopy(self.q).requires_grad_(False)

    def act(self, s: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.actor(s).chunk(2, -1)
        dist = Normal(mean, log_std.clamp(-5, 1).exp())
        u = dist.rsample()
        logp = dist.log_prob(u) - 2 * (0.6931471805599453 - u - F.softplus(-2 * u))
        return torch.tanh(u), logp.sum(-1)


def _critic_loss(model: Any, b: Any) -> Tensor:
    with torch.no_grad():
        a2, logp = model.act(b["s2"])
        y = b["r"] + 0.9 * (
            model.target(torch.cat([b["s2"], a2], -1)).amin(-1) - model.log_alpha.exp() * logp
        )
    return (model.q(torch.cat([b["s"], b["a"]], -1)) - y.unsqueeze(-1)).square().mean()


def _actor_loss(model: Any, b: Any) -> Tensor:
    a, logp = model.act(b["s"])
    return (model.log_alpha.exp().detach() * logp - model.q(torch.cat([b["s"], a], -1)).amin(-1)).mean()


def _temperature_loss(model: Any, b: Any) -> Tensor:
    with torch.no_grad():
        _, logp = model.act(b["s"])
    return -(model.log_alpha * (logp - 2.0)).mean()


def three_losses_in_turn() -> Job:
    losses = {
        "critic": ml.Objective(loss=_critic_loss, optimizer=adam, parameters=["q"]),
        "actor": ml.Objective(loss=_actor_loss, optimizer=adam, parameters=["actor"]),
        "temperature": ml.Objective(loss=_temperature_loss, optimizer=adam, parameters=["log_alpha"]),
    }
    rows = [{k: v[i] for k, v in CONTROL.items()} for i in range(24)]
    return Job(model=SquashedActor, losses=losses, data=lambda: rows, batch_size=8, steps=3)


class Options(nn.Module):
    """Options that end by a draw and are picked greedily; one policy each, kept stacked (option critic)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.q, self.end = net(5, 10, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.w, self.b = nn.Parameter(torch.randn(3, 8, 3) * 0.3), nn.Parameter(torch.zeros(3, 3))

    def forward(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        option, logps, qs, ends = None, [], [], []
        for t in range(s.size(1)):
            h = torch.tanh(self.body(s[:, t]))
            q = self.q(h)
            beta = torch.sigmoid(self.end(h))
            greedy = torch.where(torch.rand(len(q)) < 0.1, torch.randint(0, 3, (len(q),)), q.argmax(-1))
            if option is None:
                option = greedy
            else:
                stop = Bernoulli(beta.gather(1, option[:, None]).squeeze(1).detach()).sample().bool()
                option = torch.where(stop, greedy, option)
            logits = torch.bmm(h.unsqueeze(1), self.w[option]).squeeze(1) + self.b[option]
            logps.append(logits.log_softmax(-1))
            qs.append(q.gather(1, option[:, None]).squeeze(1))
            ends.append(beta.gather(1, option[:, None]).squeeze(1) * (qs[-1] - q.amax(-1) + 0.1).detach())
        return torch.stack(logps, 1), torch.stack(qs, 1), torch.stack(ends, 1)


def _options_loss(model: Any, b: Any) -> Tensor:
    logp, q, end = model(b["s"])
    returns = b["r"].flip(1).cumsum(1).flip(1)
    advantage = (returns - q).detach()
    return (
        (q - returns).square().mean()
        - (logp.gather(-1, b["a"][..., None]).squeeze(-1) * advantage).mean()
        + end.mean()
    )


def options_that_end_by_draws() -> Job:
    return job_of(Options, _options_loss, ROLLOUT)


class Communicating(nn.Module):
    """Three agents with shared weights, a mean of the others' messages, a hard gate to speak; a critic of all (IC3Net, MADDPG)."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.cell, self.talk, self.gate = (
            nn.Linear(5, 9),
            nn.GRUCell(9, 9),
            nn.Linear(9, 9),
            nn.Linear(9, 2),
        )
        self.pi, self.critic = nn.Linear(9, 2), net(3 * 9, 10, 1)

    def forward(self, s: Tensor) -> tuple[Beta, Tensor]:
        b, n, _ = s.shape
        h = torch.tanh(self.encode(s))
        others = (1 - torch.eye(n)).to(s) / (n - 1)
        for _ in range(2):
            speaks = F.gumbel_softmax(self.gate(h), tau=0.7, hard=True, dim=-1)[..., :1]
            h = self.cell((others @ (self.talk(h) * speaks)).flatten(0, 1), h.flatten(0, 1)).view(b, n, -1)
        alpha, beta = (F.softplus(self.pi(h)) + 1).unbind(-1)
        return Beta(alpha, beta), self.critic(h.flatten(1)).squeeze(-1)


def _team_loss(model: Any, b: Any) -> Tensor:
    dist, value = model(b["s"])
    advantage = (b["r"] - value).detach().unsqueeze(1)
    return (
        (value - b["r"]).square().mean()
        - (dist.log_prob(b["a"]) * advantage).mean()
        - 1e-3 * dist.entropy().mean()
    )


def agents_that_talk() -> Job:
    return job_of(
        Communicating,
        _team_loss,
        {"s": normal(565, 3, 5), "a": uniform(566, 3) * 0.8 + 0.1, "r": normal(567)},
    )


class TrustRegion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ac, self.log_beta = ActorCritic(), nn.Parameter(torch.zeros(()), requires_grad=False)
        self.old = copy.deepcopy(self.ac).requires_grad_(False)


def _penalised(model: Any, b: Any) -> Tensor:
    """A KL penalty whose weight is moved by what the KL is (PPO-penalty), in the loss."""
    new, value = model.ac(b["s"])
    with torch.no_grad():
        old, _ = model.old(b["s"])
    kl = kl_divergence(old, new).mean()
    with torch.no_grad():
        model.log_beta += torch.where(kl > 0.02, 0.1, -0.1).to(kl)
    ratio = (new.log_prob(b["a"]) - b["logp"]).exp()
    returns = (b["r"] * 0.9 ** torch.arange(b["r"].size(1)).to(b["r"])).flip(1).cumsum(1).flip(1)
    return (
        model.log_beta.exp() * kl
        - (ratio * (returns - value).detach()).mean()
        + 0.5 * F.mse_loss(value, returns)
    )


def penalties_that_move() -> Job:
    return job_of(TrustRegion, _penalised, ROLLOUT)
