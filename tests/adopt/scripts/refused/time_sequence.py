"""Waves that are predicted by an optimizer which evaluates the loss itself."""

import torch
import torch.nn as nn
import torch.optim as optim

torch.manual_seed(0)
waves = torch.sin(torch.arange(64)[None, :] / 4 + torch.arange(8)[:, None])
input, target = waves[:, :-1], waves[:, 1:]
seq = nn.Sequential(nn.Linear(63, 16), nn.Tanh(), nn.Linear(16, 63))
criterion = nn.MSELoss()
optimizer = optim.LBFGS(seq.parameters(), lr=0.8)
for i in range(3):
    print("STEP: ", i)

    def closure():
        optimizer.zero_grad()
        out = seq(input)
        loss = criterion(out, target)
        loss.backward()
        return loss

    optimizer.step(closure)
