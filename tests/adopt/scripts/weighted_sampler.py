"""Rare classes drawn as often as others."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

torch.manual_seed(0)
x = torch.randn(300, 8)
y = (x.sum(1) > 3).long()
counts = torch.bincount(y)
weights = 1.0 / counts[y].double()
sampler = WeightedRandomSampler(weights, num_samples=len(weights), replacement=True)
train_loader = DataLoader(TensorDataset(x, y), batch_size=25, sampler=sampler)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(3):
    running_loss = 0.0
    for i, (inputs, labels) in enumerate(train_loader, start=1):
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
        if i % 5 == 0:
            print(f"[{epoch + 1}, {i}] loss: {running_loss / 5:.3f}")
            running_loss = 0.0
