"""Reinforcement learning: no batch, a loss that is a sum over an episode, attributes of the module written by the loop."""

import torch
from torch import nn, optim
from torch.distributions import Categorical
from torch.nn import functional as F

import meshloom as ml

torch.manual_seed(543)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1, self.action_head, self.value_head = nn.Linear(4, 16), nn.Linear(16, 2), nn.Linear(16, 1)
        self.saved_actions, self.rewards = [], []

    def forward(self, x):
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


model = ml.parallel(Policy())
optimizer = optim.Adam(model.parameters(), lr=3e-2)
for _episode in range(3):
    state = torch.randn(4)
    for _ in range(5):
        probs, value = model(state)
        m = Categorical(probs)
        action = m.sample()
        model.saved_actions.append((m.log_prob(action), value))
        model.rewards.append(float(state[0]) * (1 - 2 * action.item()))
        state = state.roll(1) + 0.1 * torch.randn(4)
    returns = torch.tensor(model.rewards).flip(0).cumsum(0).flip(0)
    losses = [
        -log_prob * (r - value.item()) + F.smooth_l1_loss(value, r.view(1))
        for (log_prob, value), r in zip(model.saved_actions, returns, strict=True)
    ]
    optimizer.zero_grad()
    loss = torch.stack(losses).sum()
    loss.backward()
    optimizer.step()
    del model.rewards[:], model.saved_actions[:]
print(f"{loss.item():.3f}")
