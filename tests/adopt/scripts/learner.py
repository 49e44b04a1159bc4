"""A learner whose optimizer is made in fit(), with a lazily made scheduler, a dict of metrics, and callbacks."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Learner:
    def __init__(self, model, loss_func, opt_func=torch.optim.SGD):
        self.model, self.loss_func, self.opt_func = model, loss_func, opt_func
        self.recorder = {"train_loss": [], "valid_loss": []}
        self.callbacks = []

    def one_batch(self, xb, yb):
        self.xb, self.yb = xb, yb
        self.pred = self.model(self.xb)
        self.loss = self.loss_func(self.pred, self.yb)
        if self.model.training:
            self.loss.backward()
            self.opt.step()
            self.sched.step()
            self.opt.zero_grad()

    def fit_one_cycle(self, epochs, lr, train_dl, valid_dl):
        self.opt = self.opt_func(self.model.parameters(), lr=lr)
        self.sched = torch.optim.lr_scheduler.OneCycleLR(
            self.opt, lr, epochs=epochs, steps_per_epoch=len(train_dl)
        )
        for self.epoch in range(epochs):
            self.model.train()
            for xb, yb in train_dl:
                self.one_batch(xb, yb)
                self.recorder["train_loss"].append(self.loss.item())
            self.model.eval()
            with torch.no_grad():
                total, count = 0.0, 0
                for xb, yb in valid_dl:
                    self.one_batch(xb, yb)
                    total += self.loss.item() * len(xb)
                    count += len(xb)
            self.recorder["valid_loss"].append(total / count)
            print(self.epoch, total / count)


torch.manual_seed(0)
x = torch.randn(320, 7)
y = x[:, :3].prod(1, keepdim=True)
train_dl = DataLoader(TensorDataset(x[:256], y[:256]), 32, shuffle=True)
valid_dl = DataLoader(TensorDataset(x[256:], y[256:]), 64)
learn = Learner(nn.Sequential(nn.Linear(7, 32), nn.GELU(), nn.Linear(32, 1)), nn.MSELoss(), torch.optim.AdamW)
learn.fit_one_cycle(3, 1e-2, train_dl, valid_dl)
