"""A one-cycle schedule stepped in every batch, Nesterov's momentum, and arguments in a dataclass."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


@dataclass
class Config:
    epochs: int = 3
    batch_size: int = 64
    max_lr: float = 0.2
    seed: int = 7


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 10)])

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = F.silu(layer(x))
        return self.layers[-1](x)


cfg = Config()
torch.manual_seed(cfg.seed)
model = MLP()
x, y = load_digits(return_X_y=True)
train_ds = torch.utils.data.TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
train_dl = torch.utils.data.DataLoader(train_ds, batch_size=cfg.batch_size, shuffle=True, drop_last=True)
optimizer = torch.optim.SGD(model.parameters(), lr=cfg.max_lr / 10, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=cfg.max_lr, epochs=cfg.epochs, steps_per_epoch=len(train_dl)
)

for epoch in range(cfg.epochs):
    correct = 0
    for xb, yb in train_dl:
        logits = model(xb)
        loss = F.cross_entropy(logits, yb, label_smoothing=0.05)
        loss.backward()
        optimizer.step()
        scheduler.step()
        model.zero_grad(set_to_none=True)
        correct += (logits.argmax(-1) == yb).sum().item()
    print(f"{epoch=} {loss.item()=:.4f} {correct / len(train_ds):.3f} lr={scheduler.get_last_lr()[0]:.4f}")
