"""A criterion and an optimizer that one call makes, in one of several ways."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def prepare(model, fast):
    if fast:
        return nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)
    return nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-2)


torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(60, 7), torch.randint(5, (60,))), batch_size=20)
model = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5))
criterion, optimizer = prepare(model, fast=False)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
