"""A loader in a class of one's own around it."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class WrappedDataLoader:
    def __init__(self, dl, func):
        self.dl = dl
        self.func = func

    def __len__(self):
        return len(self.dl)

    def __iter__(self):
        for b in self.dl:
            yield self.func(*b)


torch.manual_seed(0)
x, y = torch.randn(200, 12), torch.randint(0, 3, (200,))
train_dl = WrappedDataLoader(
    DataLoader(TensorDataset(x, y), batch_size=20), lambda x, y: (x.view(-1, 1, 12), y)
)
model = nn.Sequential(nn.Conv1d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(32, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for xb, yb in train_dl:
    loss = nn.functional.cross_entropy(model(xb), yb)
    loss.backward()
    opt.step()
    opt.zero_grad()
