"""A LightningModule under a plan: one argument of Lightning's Trainer (docs/lightning.md).

    python examples/21_lightning.py                                  # one process
    meshloom run    examples/21_lightning.py --plan dp=2             # two replicas, half of each batch on each
    meshloom run    examples/21_lightning.py --plan dp=2,zero=3      # of which each holds half of the parameters
    meshloom verify examples/21_lightning.py --plan tp=2             # its first steps: those of one process?

Needs `pip install lightning`.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as lightning
import torch
import torchmetrics
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import meshloom as ml


class Digits(lightning.LightningModule):
    """Reads digits of 64 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.accuracy(self.net(x), y)
        self.log("accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def digits(train: bool) -> TensorDataset:
    """1797 digits, of which every fifth is held out."""
    found: Any = load_digits()
    chosen = (torch.arange(len(found.target)) % 5 != 0) == train
    x = torch.tensor(found.data, dtype=torch.get_default_dtype())[chosen] / 16
    return TensorDataset(x, torch.tensor(found.target)[chosen])


if __name__ == "__main__":
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        strategy=ml.lightning.Strategy(), max_epochs=3, logger=False, enable_checkpointing=False
    )
    train, held_out = (
        DataLoader(digits(train=True), batch_size=64, shuffle=True),
        DataLoader(digits(train=False), batch_size=120),
    )
    trainer.fit(Digits(), train, held_out)
    trainer.save_checkpoint("digits.ckpt")
    if ml.main:
        print(f"accuracy {float(trainer.callback_metrics['accuracy']):.4f}")
