"""A criterion and an optimizer that one statement makes."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(60, 7), torch.randint(5, (60,))), batch_size=20)
model = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5))
criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
