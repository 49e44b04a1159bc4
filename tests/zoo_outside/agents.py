"""Reinforcement learning: targets that follow, observations normalised by what was seen, hidden states that are reset, worlds that are imagined."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import (
    Categorical,
    Independent,
    Normal,
    OneHotCategoricalStraightThrough,
    kl_divergence,
)
from torch.nn import functional as F

import meshloom as ml
from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal, uniform


class Transition(NamedTuple):
    state: Tensor
    action: Tensor
    reward: Tensor
    next_state: Tensor
    done: Tensor


STEPS = [Transition(normal(321, 5)[i], uniform(322, 2)[i] * 2 - 1, normal(323)[i], normal(324, 5)[i], (uniform(325)[i] < 0.2)) for i in range(24)]  # fmt: skip
ROLLOUTS = {
    "obs": normal(326, 6, 5), "action": integers(327, 3, 6), "done": (uniform(328, 6) < 0.25), "value": normal(329, 6),
    "reward": normal(330, 6), "logp": -uniform(331, 6) - 0.5, "h0": normal(332, 9),
}  # fmt: skip


class TD3(nn.Module):
    """Twin critics; targets follow in the loss, by `data`, every second time as a counter says."""

    def __init__(self) -> None:
        super().__init__()

        def net(i: int, o: int) -> nn.Sequential:
            return nn.Sequential(nn.Linear(i, 13), nn.ReLU(), nn.Linear(13, 9), nn.ReLU(), nn.Linear(9, o))

        self.actor, self.q1, self.q2 = net(5, 2), net(7, 1), net(7, 1)
        self.targets = nn.ModuleDict(
            {name: copy.deepcopy(getattr(self, name)) for name in ("actor", "q1", "q2")}
        )
        for p in self.targets.parameters():
            p.requires_grad = False

    def soft_update(self, tau: float) -> None:
        for name, target in self.targets.items():
            for param, target_param in zip(
                getattr(self, name).parameters(), target.parameters(), strict=True
            ):
                target_param.data.copy_(tau * param.data + (1 - tau) * target_param.data)


def _critic_of_td3(model: Any, b: Transition) -> Tensor:
    with torch.no_grad():
        noise = (torch.randn_like(b.action) * 0.2).clamp(-0.5, 0.5)
        next_action = (torch.tanh(model.targets["actor"](b.next_state)) + noise).clamp(-1, 1)
        sa = torch.cat([b.next_state, next_action], 1)
        target_q = torch.min(model.targets["q1"](sa), model.targets["q2"](sa))
        target_q = b.reward.unsqueeze(1) + (1 - b.done.to(sa.dtype).unsqueeze(1)) * 0.99 * target_q
    sa = torch.cat([b.state, b.action], 1)
    return F.mse_loss(model.q1(sa), target_q) + F.mse_loss(model.q2(sa), target_q)


def _actor_of_td3(model: Any, b: Transition) -> Tensor:
    loss = -model.q1(torch.cat([b.state, torch.tanh(model.actor(b.state))], 1)).mean()
    model.soft_update(0.05)
    return loss


def _adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for _, p in named], lr=1e-2)


def twin_delayed_policy_gradient() -> Job:
    losses = {
        "critic": ml.Objective(loss=_critic_of_td3, optimizer=_adam, parameters=["q1", "q2"]),
        "actor": ml.Objective(loss=_actor_of_td3, optimizer=_adam, parameters="actor", every=2),
    }
    return Job(model=TD3, losses=losses, data=lambda: STEPS, batch_size=8, steps=3)


class RunningMeanStd(nn.Module):
    """Chan's update of mean and variance by what the batch brings, in float64 whatever the model is in."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("running_var", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mean, var, n = x.mean(0), x.var(0), x.size(0)
            delta, tot = mean - self.running_mean, self.count + n
            new_mean = self.running_mean + delta * n / tot
            m2 = self.running_var * self.count + var * n + delta**2 * self.count * n / tot
            self.running_mean, self.running_var, self.count = new_mean.detach(), (m2 / tot).detach(), tot
        y = (x - self.running_mean.to(x.dtype)) / torch.sqrt(self.running_var.to(x.dtype) + 1e-5)
        return torch.clamp(y, min=-5.0, max=5.0)


class RecurrentPPO(nn.Module):
    """An LSTM cell in a loop over time, whose state is reset where an episode ended."""

    def __init__(self) -> None:
        super().__init__()
        self.rms, self.encoder = RunningMeanStd(5), nn.Sequential(nn.Linear(5, 11), nn.Tanh())
        self.cell, self.actor, self.critic = nn.LSTMCell(11, 9), nn.Linear(9, 3), nn.Linear(9, 1)
        for name, p in self.named_parameters():
            if "weight" in name and p.ndim == 2:
                nn.init.orthogonal_(p, 2**0.5)
            elif "bias" in name:
                nn.init.constant_(p, 0.0)

    def forward(self, obs: Tensor, done: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
        b, t = obs.shape[:2]
        x = self.encoder(self.rms(obs.flatten(0, 1))).view(b, t, -1)
        h, c, outs = h0, torch.zeros_like(h0), []
        for x_t, d in zip(x.unbind(1), done.to(x.dtype).unbind(1), strict=True):
            h, c = self.cell(x_t, ((1.0 - d).view(-1, 1) * h, (1.0 - d).view(-1, 1) * c))
            outs += [h]
        h = torch.stack(outs, 1)
        return self.actor(h), self.critic(h).squeeze(-1)


def _ppo(model: Any, b: Any) -> Tensor:
    logits, value = model(b["obs"], b["done"], b["h0"])
    probs = Categorical(logits=logits)
    with torch.no_grad():
        advantages, last = torch.zeros_like(b["reward"]), 0
        for t in reversed(range(5)):
            alive = 1.0 - b["done"][:, t + 1].to(value.dtype)
            delta = b["reward"][:, t] + 0.99 * b["value"][:, t + 1] * alive - b["value"][:, t]
            advantages[:, t] = last = delta + 0.99 * 0.95 * alive * last
        returns = advantages + b["value"]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    logratio = probs.log_prob(b["action"]) - b["logp"]
    ratio = logratio.exp()
    with torch.no_grad():
        approx_kl = ((ratio - 1) - logratio).mean()
        clipfrac = ((ratio - 1.0).abs() > 0.2).to(value.dtype).mean().item()
        if approx_kl.item() > 1e6:
            print("large", clipfrac)
    pg = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 0.8, 1.2)).mean()
    clipped = b["value"] + torch.clamp(value - b["value"], -0.2, 0.2)
    v = 0.5 * torch.max((value - returns) ** 2, (clipped - returns) ** 2).mean()
    return pg - 0.01 * probs.entropy().mean() + 0.5 * v


def recurrent_ppo() -> Job:
    return job_of(RecurrentPPO, _ppo, ROLLOUTS, clip_grad_norm=0.5)


class RSSM(nn.Module):
    """Dreamer's world model: discrete states drawn straight through, divergences balanced by two detached copies."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inp, self.cell = nn.Linear(5, 9), nn.Linear(12 + 3, 9), nn.GRUCell(9, 9)
        self.prior, self.post = (
            nn.Sequential(nn.Linear(9, 11), nn.ELU(), nn.Linear(11, 12)),
            nn.Linear(18, 12),
        )
        self.decoder, self.reward = (
            nn.Sequential(nn.Linear(21, 11), nn.ELU(), nn.Linear(11, 5)),
            nn.Linear(21, 1),
        )

    def _dist(self, logits: Tensor) -> Independent:
        return Independent(OneHotCategoricalStraightThrough(logits=logits.view(-1, 3, 4)), 1)

    def forward(self, b: Any) -> Tensor:
        obs, action = b["obs"], F.one_hot(b["action"], 3).to(b["obs"])
        h, z = b["h0"], torch.zeros(len(obs), 12).to(obs)
        loss = 0.0
        for t in range(obs.size(1)):
            h = self.cell(F.elu(self.inp(torch.cat([z, action[:, t]], -1))), h)
            prior = self.prior(h)
            post = self.post(torch.cat([h, self.embed(obs[:, t])], -1))
            q = self._dist(post)
            z = q.rsample().flatten(1)
            feat = torch.cat([h, z], -1)
            kl_lhs = kl_divergence(self._dist(post.detach()), self._dist(prior)).mean()
            kl_rhs = kl_divergence(q, self._dist(prior.detach())).mean()
            decoded = Independent(Normal(self.decoder(feat), 1.0), 1)
            loss = (
                loss
                - decoded.log_prob(obs[:, t]).mean()
                + 0.8 * kl_lhs.clamp(min=0.1)
                + 0.2 * kl_rhs.clamp(min=0.1)
            )
            loss = loss + F.mse_loss(self.reward(feat).squeeze(-1), b["reward"][:, t])
        return loss / obs.size(1)


def dreamer_world_model() -> Job:
    return job_of(RSSM, lambda m, b: m(b), ROLLOUTS)


class DecisionTransformer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.rtg, self.state, self.action = nn.Linear(1, width), nn.Linear(5, width), nn.Embedding(3, width)
        self.time, self.ln = nn.Embedding(6, width), nn.LayerNorm(width)
        self.attn = nn.ModuleList([nn.MultiheadAttention(width, 2, batch_first=True) for _ in range(2)])
        self.ff = nn.ModuleList(
            [
                nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 13), nn.GELU(), nn.Linear(13, width))
                for _ in range(2)
            ]
        )
        self.head = nn.Linear(width, 3)

    def forward(self, b: Any) -> Tensor:
        rtg = torch.flip(torch.cumsum(torch.flip(b["reward"], [1]), 1), [1]).unsqueeze(-1)
        bs, t = b["action"].shape
        pos = self.time(torch.arange(t, device=rtg.device))
        tokens = (self.rtg(rtg) + pos, self.state(b["obs"]) + pos, self.action(b["action"]) + pos)
        x = self.ln(torch.stack(tokens, dim=1).permute(0, 2, 1, 3).reshape(bs, 3 * t, -1))
        causal = torch.triu(torch.ones(3 * t, 3 * t, dtype=torch.bool), diagonal=1)
        for attn, ff in zip(self.attn, self.ff, strict=True):
            x = x + attn(x, x, x, attn_mask=causal, need_weights=False)[0]
            x = x + ff(x)
        x = x.reshape(bs, t, 3, -1).permute(0, 2, 1, 3)
        return self.head(x[:, 1])


def _masked_actions(model: Any, b: Any) -> tuple[Tensor, Tensor]:
    alive = (b["done"].long().cumsum(1) == 0).reshape(-1)
    logits = model(b).reshape(-1, 3)[alive]
    target = b["action"].reshape(-1)[alive]
    return F.cross_entropy(logits, target, reduction="sum"), alive.sum()


def decision_transformer() -> Job:
    return job_of(DecisionTransformer, _masked_actions, ROLLOUTS, batch_size=7)


class MuZero(nn.Module):
    """States scaled to [0, 1] by their own extremes, halves of gradients by a hook, targets in categories."""

    def __init__(self) -> None:
        super().__init__()
        self.represent = nn.Sequential(nn.Linear(5, 11), nn.ReLU(), nn.Linear(11, 9))
        self.dynamics, self.reward = (
            nn.Sequential(nn.Linear(12, 11), nn.ReLU(), nn.Linear(11, 9)),
            nn.Linear(9, 7),
        )
        self.policy, self.value = nn.Linear(9, 3), nn.Linear(9, 7)

    def scale(self, s: Tensor) -> Tensor:
        low, high = s.min(1, keepdim=True)[0], s.max(1, keepdim=True)[0]
        span = high - low
        span[span < 1e-5] += 1e-5
        return (s - low) / span

    def forward(self, b: Any) -> Tensor:
        s = self.scale(self.represent(b["obs"][:, 0]))
        loss = F.cross_entropy(self.policy(s), b["action"][:, 0])
        for k in range(1, 4):
            a = torch.zeros(len(s), 3, dtype=s.dtype)
            a.scatter_(1, b["action"][:, k - 1].unsqueeze(1), 1.0)
            s = self.scale(self.dynamics(torch.cat([s, a], 1)))
            if s.requires_grad:
                s.register_hook(lambda grad: grad * 0.5)
            step = F.cross_entropy(self.policy(s), b["action"][:, k]) + self._two_hot(
                self.value(s), b["value"][:, k]
            )
            step = step + self._two_hot(self.reward(s), b["reward"][:, k])
            if step.requires_grad:
                step.register_hook(lambda grad: grad / 3)
            loss = loss + step
        return loss

    def _two_hot(self, logits: Tensor, x: Tensor) -> Tensor:
        x = torch.sign(x) * (torch.sqrt(torch.abs(x) + 1) - 1) + 0.001 * x
        x = torch.clamp(x, -3, 3)
        floor = x.floor()
        prob = x - floor
        target = torch.zeros_like(logits)
        target.scatter_(1, (floor + 3).long().unsqueeze(-1), (1 - prob).unsqueeze(-1))
        index = floor + 3 + 1
        prob = prob.masked_fill(index > 6, 0.0)
        index = index.masked_fill(index > 6, 0.0)
        target.scatter_(1, index.long().unsqueeze(-1), prob.unsqueeze(-1))
        return -(F.log_softmax(logits, 1) * target).sum(1).mean()


def mu_zero() -> Job:
    return job_of(MuZero, lambda m, b: m(b), ROLLOUTS)


class NoisyLinear(nn.Module):
    """Noise of the weights that a call of `reset_noise` draws into buffers, in the loss, as Rainbow does."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.weight_mu, self.weight_sigma = nn.Parameter(torch.empty(outputs, inputs).uniform_(-0.4, 0.4)), nn.Parameter(torch.full((outputs, inputs), 0.1))  # fmt: skip
        self.bias_mu, self.bias_sigma = nn.Parameter(torch.empty(outputs).uniform_(-0.4, 0.4)), nn.Parameter(torch.full((outputs,), 0.1))  # fmt: skip
        self.register_buffer("weight_epsilon", torch.empty(outputs, inputs))
        self.register_buffer("bias_epsilon", torch.empty(outputs))
        self.reset_noise()

    def _scale(self, size: int) -> Tensor:
        x = torch.randn(size)
        return x.sign().mul_(x.abs().sqrt_())

    def reset_noise(self) -> None:
        eps_in, eps_out = self._scale(self.inputs), self._scale(self.outputs)
        self.weight_epsilon.copy_(eps_out.ger(eps_in))
        self.bias_epsilon.copy_(eps_out)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return F.linear(x, self.weight_mu + self.weight_sigma * self.weight_epsilon, self.bias_mu + self.bias_sigma * self.bias_epsilon)  # fmt: skip
        return F.linear(x, self.weight_mu, self.bias_mu)


class Rainbow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.value, self.advantage = nn.Linear(5, 11), NoisyLinear(11, 1), NoisyLinear(11, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.body(x))
        a = self.advantage(x)
        return self.value(x) + a - a.mean(1, keepdim=True)

    def reset_noise(self) -> None:
        for name, module in self.named_children():
            if name in ("value", "advantage"):
                module.reset_noise()


def _rainbow(model: Any, b: Any) -> Tensor:
    model.reset_noise()
    q = model(b["obs"][:, 0]).gather(1, b["action"][:, :1]).squeeze(1)
    with torch.no_grad():
        goal = b["reward"][:, 0] + 0.9 * model(b["obs"][:, 1]).max(1)[0] * (1 - b["done"][:, 0].to(q.dtype))
    return F.smooth_l1_loss(q, goal)


def noisy_networks() -> Job:
    return job_of(Rainbow, _rainbow, ROLLOUTS)
