"""A main() with a dataclass of settings, weight decay groups by name, a warm-up with a cosine, label smoothing, cudnn flags."""

import math
import random
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset, random_split


@dataclass
class Config:
    batch_size: int = 32
    lr: float = 3e-3
    weight_decay: float = 0.05
    warmup_steps: int = 10
    epochs: int = 2
    hidden: int = 48
    seed: int = 7
    label_smoothing: float = 0.1
    betas: tuple = (0.9, 0.98)
    no_decay: list = field(default_factory=lambda: ["bias", "norm"])


def set_seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.embed = nn.Linear(64, cfg.hidden)
        self.blocks = nn.ModuleList([Block(cfg.hidden) for _ in range(2)])
        self.norm = nn.LayerNorm(cfg.hidden)
        self.head = nn.Linear(cfg.hidden, 10)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def get_dataloaders(cfg: Config):
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    full = TensorDataset(x, y)
    n_val = len(full) // 5
    train_set, val_set = random_split(full, [len(full) - n_val, n_val])
    train_loader = DataLoader(train_set, batch_size=cfg.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(val_set, batch_size=2 * cfg.batch_size, shuffle=False)
    return train_loader, val_loader


def build_optimizer(model: nn.Module, cfg: Config):
    decay, no_decay = [], []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        if any(nd in name for nd in cfg.no_decay):
            no_decay.append(param)
        else:
            decay.append(param)
    groups = [
        {"params": decay, "weight_decay": cfg.weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=cfg.lr, betas=cfg.betas)


def build_scheduler(optimizer, cfg: Config, total_steps: int):
    def lr_lambda(step: int) -> float:
        if step < cfg.warmup_steps:
            return (step + 1) / cfg.warmup_steps
        progress = (step - cfg.warmup_steps) / max(1, total_steps - cfg.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, lr_lambda)


@torch.inference_mode()
def evaluate(model, loader, device):
    model.eval()
    loss_sum, correct, n = 0.0, 0, 0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        logits = model(x)
        loss_sum += F.cross_entropy(logits, y, reduction="sum").item()
        correct += (logits.argmax(-1) == y).sum().item()
        n += y.size(0)
    return {"loss": loss_sum / n, "acc": correct / n}


def main() -> None:
    cfg = Config()
    print(asdict(cfg))
    set_seed(cfg.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader, val_loader = get_dataloaders(cfg)
    model = Classifier(cfg).to(device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e3:.1f}k parameters")
    optimizer = build_optimizer(model, cfg)
    total_steps = cfg.epochs * len(train_loader)
    scheduler = build_scheduler(optimizer, cfg, total_steps)
    criterion = nn.CrossEntropyLoss(label_smoothing=cfg.label_smoothing)
    best_acc = 0.0
    best_state = None
    for epoch in range(cfg.epochs):
        model.train()
        for step, (x, y) in enumerate(train_loader):
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            if step % 20 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.2e}")
        metrics = evaluate(model, val_loader, device)
        print(f"epoch {epoch}: val loss {metrics['loss']:.4f} acc {metrics['acc']:.3f}")
        if metrics["acc"] > best_acc:
            best_acc = metrics["acc"]
            best_state = {k: v.cpu().clone() for k, v in model.state_dict().items()}
    if best_state is not None:
        model.load_state_dict(best_state)


if __name__ == "__main__":
    main()
