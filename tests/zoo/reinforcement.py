"""Losses of reinforcement learning over stored transitions: frozen target networks, returns by loops, clipped ratios."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal, uniform

STATES, ACTIONS = 5, 4
MEMORY = {
    "state": normal(51, STATES), "action": integers(52, ACTIONS), "reward": normal(53), "next_state": normal(54, STATES),
    "done": integers(55, 2), "log_prob": -uniform(56) - 0.5, "advantage": normal(57), "value": normal(58), "returns": normal(59),
}  # fmt: skip
ROLLOUT = {"state": normal(60, 6, STATES), "action": integers(61, ACTIONS, 6), "reward": normal(62, 6), "done": integers(63, 2, 6)}  # fmt: skip
CONTINUOUS = {**MEMORY, "action": 0.9 * torch.tanh(normal(64, 3))}


def mlp(inputs: int, outputs: int, hidden: int = 11) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 9), nn.ReLU(), nn.Linear(9, outputs))  # fmt: skip


class WithTarget(nn.Module):
    """A network and a frozen copy that is behind."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.target = copy.deepcopy(net)
        for p in self.target.parameters():
            p.requires_grad = False
            p.data.mul_(0.9)


def _dqn(model: Any, b: Any) -> Tensor:
    q = model.net(b["state"]).gather(1, b["action"].unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        best = model.net(b["next_state"]).argmax(dim=1, keepdim=True)
        following = model.target(b["next_state"]).gather(1, best).squeeze(1)
        following[b["done"] == 1] = 0.0
    return nn.SmoothL1Loss()(q, b["reward"] + 0.99 * following.detach())


def double_dqn() -> Job:
    return job_of(lambda: WithTarget(mlp(STATES, ACTIONS)), _dqn, MEMORY)


class Dueling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.feature = nn.Sequential(nn.Linear(STATES, 11), nn.ReLU())
        self.advantage, self.value = mlp(11, ACTIONS), mlp(11, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.feature(x)
        advantage, value = self.advantage(x), self.value(x)
        return value + advantage - advantage.mean()


def dueling_dqn() -> Job:
    return job_of(lambda: WithTarget(Dueling()), _dqn, MEMORY)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(STATES, 11), nn.Tanh(), nn.Linear(11, 11), nn.Tanh())
        self.actor, self.critic = nn.Linear(11, ACTIONS), nn.Linear(11, 1)

    def forward(self, x: Tensor) -> tuple[Categorical, Tensor]:
        x = self.base(x)
        return Categorical(logits=self.actor(x)), self.critic(x).squeeze(-1)


def _ppo(model: Any, b: Any) -> Tensor:
    dist, value = model(b["state"])
    log_prob, entropy = dist.log_prob(b["action"]), dist.entropy()
    logratio = log_prob - b["log_prob"]
    ratio = logratio.exp()
    with torch.no_grad():
        approx_kl = ((ratio - 1) - logratio).mean()
        clipfracs = ((ratio - 1.0).abs() > 0.2).float().mean().item()
    if clipfracs < 0 or torch.isnan(approx_kl):
        raise ValueError("impossible")
    adv = b["advantage"]
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    policy = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 1 - 0.2, 1 + 0.2)).mean()
    clipped = b["value"] + torch.clamp(value - b["value"], -0.2, 0.2)
    v_loss = 0.5 * torch.max((value - b["returns"]) ** 2, (clipped - b["returns"]) ** 2).mean()
    return policy - 0.01 * entropy.mean() + v_loss * 0.5


def ppo() -> Job:
    return job_of(ActorCritic, _ppo, MEMORY, clip_grad_norm=0.5)


def _a2c(model: Any, b: Any) -> Tensor:
    dist, value = model(b["state"])
    rewards, done = b["reward"], b["done"]
    future = torch.zeros(rewards.size(0), dtype=rewards.dtype)
    gae, policy_loss, value_loss = torch.zeros_like(future), 0, 0
    log_probs = dist.log_prob(b["action"])
    for i in reversed(range(rewards.size(1) - 1)):
        future = 0.99 * future * (1 - done[:, i]) + rewards[:, i]
        value_loss = value_loss + 0.5 * (future - value[:, i]).pow(2)
        delta = rewards[:, i] + 0.99 * value[:, i + 1].data * (1 - done[:, i]) - value[:, i].data
        gae = gae * 0.99 * 0.95 + delta
        policy_loss = policy_loss - log_probs[:, i] * gae.detach() - 0.01 * dist.entropy()[:, i]
    return (policy_loss + 0.5 * value_loss).mean()


def a2c_with_gae() -> Job:
    return job_of(ActorCritic, _a2c, ROLLOUT)


def _reinforce(model: Any, b: Any) -> Tensor:
    losses = []
    for i in range(b["state"].size(0)):
        dist, _ = model(b["state"][i])
        R, returns = 0.0, []  # noqa: N806
        for r in b["reward"][i].tolist()[::-1]:
            R = r + 0.9 * R  # noqa: N806
            returns.insert(0, R)
        returns = torch.tensor(returns, dtype=b["reward"].dtype)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        losses.append((-dist.log_prob(b["action"][i]) * returns).sum())
    return torch.stack(losses).mean()


def reinforce_with_python_returns() -> Job:
    return job_of(ActorCritic, _reinforce, ROLLOUT)


def _vtrace(model: Any, b: Any) -> Tensor:
    dist, values = model(b["state"])
    log_rhos = dist.log_prob(b["action"]) - math.log(1 / ACTIONS)
    discounts = (1 - b["done"]).to(values.dtype) * 0.99
    with torch.no_grad():
        rhos = torch.exp(log_rhos)
        clipped, cs = torch.clamp(rhos, max=1.0), torch.clamp(rhos, max=1.0)
        following = torch.cat([values[:, 1:], values[:, -1:]], dim=1)
        deltas = clipped * (b["reward"] + discounts * following - values)
        acc, result = torch.zeros_like(values[:, 0]), []
        for t in range(values.shape[1] - 1, -1, -1):
            acc = deltas[:, t] + discounts[:, t] * cs[:, t] * acc
            result.append(acc)
        result.reverse()
        vs = torch.stack(result, 1) + values
        pg = clipped * (b["reward"] + discounts * torch.cat([vs[:, 1:], vs[:, -1:]], 1) - values)
    loss = -(dist.log_prob(b["action"]) * pg.detach()).sum() + 0.5 * ((vs - values) ** 2).sum()
    return (loss - 0.01 * dist.entropy().sum()) / len(values)


def v_trace() -> Job:
    return job_of(ActorCritic, _vtrace, ROLLOUT)


class SAC(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.q1, self.q2 = mlp(STATES, 6), mlp(STATES + 3, 1), mlp(STATES + 3, 1)
        self.target1, self.target2 = copy.deepcopy(self.q1), copy.deepcopy(self.q2)
        self.target1.requires_grad_(False)
        self.target2.requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.zeros(1))

    def sample(self, state: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.actor(state).chunk(2, -1)
        normal_ = Normal(mean, torch.clamp(log_std, -20, 2).exp())
        x = normal_.rsample()
        y = torch.tanh(x)
        log_prob = normal_.log_prob(x) - torch.log(1 - y.pow(2) + 1e-6)
        return y, log_prob.sum(1, keepdim=True)


def _sac(model: Any, b: Any) -> Tensor:
    with torch.no_grad():
        a, logp = model.sample(b["next_state"])
        both = torch.cat([b["next_state"], a], 1)
        following = torch.min(model.target1(both), model.target2(both)) - model.log_alpha.exp() * logp
        wanted = b["reward"].view(-1, 1) + (1 - b["done"].view(-1, 1)) * 0.99 * following
    both = torch.cat([b["state"], b["action"]], 1)
    q_loss = F.mse_loss(model.q1(both), wanted) + F.mse_loss(model.q2(both), wanted)
    pi, logp = model.sample(b["state"])
    both = torch.cat([b["state"], pi], 1)
    policy = (model.log_alpha.exp().detach() * logp - torch.min(model.q1(both), model.q2(both))).mean()
    alpha = -(model.log_alpha * (logp.detach() - 3.0)).mean()
    return q_loss + policy + alpha


def soft_actor_critic() -> Job:
    return job_of(SAC, _sac, CONTINUOUS)


class TanhPolicy(nn.Module):
    """torch's own transformed distributions, whose inverses are cached."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.log_std = mlp(STATES, 3), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> TransformedDistribution:
        return TransformedDistribution(
            Normal(self.net(x), self.log_std.exp(), validate_args=False), [TanhTransform(cache_size=1)],
            validate_args=False,
        )  # fmt: skip


def _behaviour(model: Any, b: Any) -> Tensor:
    dist = model(b["state"])
    sample = dist.rsample()
    return -dist.log_prob(b["action"]).sum(-1).mean() + 0.01 * dist.log_prob(sample).sum(-1).mean()


def advantage_weighted_cloning() -> Job:
    return job_of(TanhPolicy, _behaviour, CONTINUOUS)


class C51(nn.Module):
    def __init__(self, atoms: int = 9) -> None:
        super().__init__()
        self.atoms, self.net, self.target = atoms, mlp(STATES, ACTIONS * atoms), mlp(STATES, ACTIONS * atoms)
        self.target.requires_grad_(False)
        self.register_buffer("support", torch.linspace(-2.0, 2.0, atoms))
        self.support: Tensor


def _categorical(model: Any, b: Any) -> Tensor:
    n = b["state"].size(0)
    rows = torch.arange(n)
    with torch.no_grad():
        dist = F.softmax(model.target(b["next_state"]).view(n, ACTIONS, -1), -1)
        best = (dist * model.support).sum(-1).argmax(1)
        p = dist[rows, best]
        tz = b["reward"].unsqueeze(1) + (1 - b["done"]).unsqueeze(1) * 0.9 * model.support
        where = (tz.clamp(-2.0, 2.0) + 2.0) / 0.5
        low, up = where.floor().long(), where.ceil().long()
        low[(up > 0) * (low == up)] -= 1
        up[(low < (model.atoms - 1)) * (low == up)] += 1
        m = torch.zeros(n, model.atoms, dtype=p.dtype)
        offset = (torch.linspace(0, (n - 1) * model.atoms, n).long().unsqueeze(1)).expand(n, model.atoms)
        m.view(-1).index_add_(0, (low + offset).view(-1), (p * (up.to(p.dtype) - where)).view(-1))
        m.view(-1).index_add_(0, (up + offset).view(-1), (p * (where - low.to(p.dtype))).view(-1))
    log_p = F.log_softmax(model.net(b["state"]).view(n, ACTIONS, -1), -1)[rows, b["action"]]
    return -(m * log_p).sum(1).mean()


def categorical_dqn() -> Job:
    return job_of(C51, _categorical, MEMORY)


def _quantiles(model: Any, b: Any) -> Tensor:
    n, num = b["state"].size(0), 5
    theta = model.net(b["state"]).view(n, ACTIONS, num)[range(n), b["action"]]
    following = model.target(b["next_state"]).view(n, ACTIONS, num)
    best = following.mean(2).max(1)[1].view(-1, 1, 1).expand(-1, -1, num)
    wanted = b["reward"].view(-1, 1) + 0.9 * following.gather(1, best).squeeze(1) * (
        1 - b["done"].view(-1, 1)
    )
    u = wanted.detach().t().unsqueeze(-1) - theta
    tau = (torch.arange(num, dtype=u.dtype) + 0.5) / num
    huber = torch.where(u.abs() <= 1.0, 0.5 * u.pow(2), u.abs() - 0.5)
    return (huber * (tau - (u.detach() < 0).to(u.dtype)).abs()).mean(0).sum(-1).mean()


def quantile_dqn() -> Job:
    return job_of(lambda: WithTarget(mlp(STATES, ACTIONS * 5)), _quantiles, MEMORY)


class QMix(nn.Module):
    """Two agents' values, mixed by weights that a hypernetwork makes of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.agent, self.w1, self.b1 = mlp(STATES, ACTIONS), nn.Linear(STATES, 2 * 7), nn.Linear(STATES, 7)
        self.w2, self.v = (
            nn.Linear(STATES, 7),
            nn.Sequential(nn.Linear(STATES, 7), nn.ReLU(), nn.Linear(7, 1)),
        )

    def forward(self, states: Tensor, actions: Tensor) -> Tensor:
        q = self.agent(states).gather(-1, actions.unsqueeze(-1)).squeeze(-1).view(-1, 1, 2)
        whole = states.mean(1)
        w1 = torch.abs(self.w1(whole)).view(-1, 2, 7)
        hidden = F.elu(torch.bmm(q, w1) + self.b1(whole).view(-1, 1, 7))
        y = torch.bmm(hidden, torch.abs(self.w2(whole)).view(-1, 7, 1)) + self.v(whole).view(-1, 1, 1)
        return y.view(-1)


def qmix() -> Job:
    data = {"s": normal(65, 2, STATES), "a": integers(66, ACTIONS, 2), "r": normal(67)}
    return job_of(QMix, lambda m, b: F.mse_loss(m(b["s"], b["a"]), b["r"]), data)


class Curiosity(nn.Module):
    """Prediction of a frozen random network, with running statistics of the observations."""

    def __init__(self) -> None:
        super().__init__()
        self.predictor, self.random = mlp(STATES, 5), mlp(STATES, 5)
        for param in self.random.parameters():
            param.requires_grad = False
        self.register_buffer("mean", torch.zeros(STATES))
        self.register_buffer("count", torch.tensor(1e-4))
        self.mean: Tensor
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.count += x.shape[0]
                self.mean += (x.mean(0) - self.mean) * x.shape[0] / self.count
        x = (x - self.mean).clamp(-5, 5)
        error = F.mse_loss(self.predictor(x), self.random(x).detach(), reduction="none").mean(-1)
        mask = torch.rand(len(error), dtype=x.dtype)
        mask = (mask < 0.5).to(x.dtype)
        return (error * mask).sum() / torch.max(mask.sum(), torch.tensor([1.0], dtype=x.dtype))


def random_network_distillation() -> Job:
    return job_of(Curiosity, lambda m, b: m(b["state"]).squeeze(), MEMORY)


def _expectile(model: Any, b: Any) -> Tensor:
    both = torch.cat([b["state"], b["action"]], -1)
    q = torch.minimum(model.target1(both), model.target2(both)).squeeze(-1).detach()
    v = model.actor(b["state"])[:, 0]
    diff = q - v
    weight = torch.where(diff > 0, 0.7, 0.3)
    adv = torch.exp(3.0 * diff.detach()).clamp(max=100.0)
    logp = Normal(model.actor(b["state"])[:, :3], 1.0).log_prob(b["action"]).sum(-1)
    td = F.mse_loss(model.q1(both).squeeze(-1), b["reward"]) + F.mse_loss(
        model.q2(both).squeeze(-1), b["reward"]
    )
    return (weight * diff**2).mean() - (adv * logp).mean() + td


def implicit_q_learning() -> Job:
    return job_of(SAC, _expectile, CONTINUOUS)
