"""Consistency training: zip of two loaders, one of which draws by weights."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

torch.manual_seed(0)
x = torch.randn(400, 8)
y = (x[:, 0] * x[:, 1] > 0).long()
labelled = DataLoader(TensorDataset(x[:80], y[:80]), batch_size=16, shuffle=True)
drawn = WeightedRandomSampler(torch.ones(320), 320)
unlabelled = DataLoader(TensorDataset(x[80:]), batch_size=64, sampler=drawn)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(3):
    for (xl, yl), (xu,) in zip(labelled, unlabelled, strict=False):
        sup = F.cross_entropy(model(xl), yl)
        p = model(xu).softmax(-1)
        q = model(xu + 0.1 * torch.randn_like(xu)).log_softmax(-1)
        loss = sup + 0.5 * F.kl_div(q, p.detach(), reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
