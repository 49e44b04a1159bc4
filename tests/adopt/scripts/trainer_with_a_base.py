"""A loop in a method of a class that has a base class."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Base:
    def fit(self, epochs):
        for _ in range(epochs):
            for x, y in self.loader:
                loss = nn.functional.mse_loss(self.model(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()


class Trainer(Base):
    def __init__(self, model, loader):
        self.model, self.loader = model, loader
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


torch.manual_seed(0)
x = torch.randn(64, 4)
trainer = Trainer(nn.Linear(4, 1), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8))
trainer.fit(2)
