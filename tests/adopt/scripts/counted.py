"""Steps counted by itertools over a loader that goes on for ever."""

import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(160, 5)
y = x.prod(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)


def forever(loader):
    while True:
        yield from loader


model = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
warmup = 10
for step, (a, b) in zip(itertools.count(1), forever(loader)):
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * min(1.0, step / warmup)
    loss = nn.functional.smooth_l1_loss(model(a), b)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step >= 60:
        break
