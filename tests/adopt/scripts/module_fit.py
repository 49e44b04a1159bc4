"""A module that trains itself: net.fit(loader)."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regressor(nn.Module):
    def __init__(self, inputs, hidden=16, lr=1e-2):
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.loss_fn = nn.MSELoss()

    def forward(self, x):
        return self.layers(x)

    def training_loss(self, x, y):
        return self.loss_fn(self(x), y)

    def fit(self, loader, epochs=2, verbose=True):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        self.train()
        for epoch in range(epochs):
            total = 0.0
            for x, y in loader:
                optimizer.zero_grad()
                loss = self.training_loss(x, y)
                loss.backward()
                optimizer.step()
                total += loss.item()
            if verbose:
                print(epoch, total / len(loader))
        return self


torch.manual_seed(5)
x = torch.randn(240, 7)
y = (x[:, :3].sum(1, keepdim=True)).sin()
loader = DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True)
net = Regressor(7)
net.fit(loader, epochs=3)
