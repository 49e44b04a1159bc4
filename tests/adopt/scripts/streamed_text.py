"""A model of characters on a stream: an iterable dataset, and a loop that ends after a number of steps."""

import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset


class Characters(IterableDataset):
    def __init__(self, path, length):
        with open(path, "rb") as file:
            self.data = file.read()
        self.length = length

    def __iter__(self):
        for start in range(0, len(self.data) - self.length - 1, self.length):
            piece = torch.tensor(list(self.data[start : start + self.length + 1]))
            yield piece[:-1], piece[1:]


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.conv = nn.Conv1d(width, width, 4)
        self.head = nn.Linear(width, 256)

    def forward(self, x):
        x = self.embed(x).transpose(1, 2)
        return self.head(F.gelu(self.conv(F.pad(x, (3, 0)))).transpose(1, 2))


max_steps = 40
torch.manual_seed(0)
loader = DataLoader(Characters(os.__file__, 16), batch_size=8, drop_last=True)
model = Model(16)
optimizer = torch.optim.NAdam(model.parameters(), lr=2e-3)
step = 0
while step < max_steps:
    for x, y in loader:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: {loss.item():.3f}")
        step += 1
        if step >= max_steps:
            break
