"""Consistency training: zip of two loaders, of which the labelled one is read again and again; an evaluation."""

from itertools import cycle

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(470, 8)
y = (x[:, 0] * x[:, 1] > 0).long()
held_out = DataLoader(TensorDataset(x[:50], y[:50]), batch_size=25)
labelled = DataLoader(TensorDataset(x[50:146], y[50:146]), batch_size=16, shuffle=True)
unlabelled = DataLoader(TensorDataset(x[146:]), batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(3):
    for (xl, yl), (xu,) in zip(cycle(labelled), unlabelled):
        sup = F.cross_entropy(model(xl), yl)
        p = model(xu).softmax(-1)
        q = model(xu + 0.1 * torch.randn_like(xu)).log_softmax(-1)
        loss = sup + 0.5 * F.kl_div(q, p.detach(), reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    correct = 0
    with torch.no_grad():
        for xb, yb in held_out:
            correct += (model(xb).argmax(1) == yb).sum().item()
    print(epoch, correct / len(held_out.dataset))
