"""A policy that is trained on what it did in an episode."""

import torch
import torch.nn as nn
from torch.distributions import Categorical

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2), nn.Softmax(dim=-1))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
for episode in range(6):
    state, log_probs, rewards = torch.randn(4), [], []
    for _ in range(8):
        m = Categorical(policy(state))
        action = m.sample()
        log_probs.append(m.log_prob(action))
        state = state + 0.1 * (2 * action.item() - 1)
        rewards.append(float(-state.abs().sum()))
    returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
    policy_loss = -(torch.stack(log_probs) * returns).sum()
    optimizer.zero_grad()
    policy_loss.backward()
    optimizer.step()
