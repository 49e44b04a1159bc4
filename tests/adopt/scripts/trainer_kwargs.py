"""A trainer that is made of a dict of settings, which come from a dataclass, the command line, and a literal."""

import argparse
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Optim:
    lr: float = 0.05
    momentum: float = 0.9
    clip: float = 1.0


class Trainer:
    def __init__(self, model, loader, *, lr, momentum=0.0, clip=None, epochs=1, log_every=10, **extra):
        self.model = model
        self.loader = loader
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
        self.clip = clip
        self.epochs = epochs
        self.log_every = log_every
        self.extra = extra
        self.step = 0

    def train_step(self, x, y):
        loss = nn.functional.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def fit(self):
        for epoch in range(self.epochs):
            for x, y in self.loader:
                loss = self.train_step(x, y)
                if self.step % self.log_every == 0:
                    print(epoch, self.step, loss)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--log_every", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(200, 6)
    loader = DataLoader(TensorDataset(x, x.pow(2).sum(1, keepdim=True)), batch_size=20, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    settings = {"model": model, "loader": loader}
    trainer = Trainer(**settings, **asdict(Optim(lr=0.02)), **vars(args))
    trainer.fit()


if __name__ == "__main__":
    main()
