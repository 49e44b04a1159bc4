"""A module in the form that Lightning asks for (`training_step`, `validation_step`, `configure_optimizers`,
`log`), with a small base class of its own."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshloom as ml


class Module(nn.Module):
    """What scripts use of Lightning's module: hyperparameters and a log."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: dict[str, Tensor] = {}
        self.hparams = SimpleNamespace()

    def save_hyperparameters(self) -> None:
        """The arguments of the constructor that called."""
        caller = inspect.currentframe().f_back  # type: ignore[union-attr]
        values = inspect.getargvalues(caller)  # type: ignore[arg-type]
        self.hparams = SimpleNamespace(
            **{name: values.locals[name] for name in values.args if name != "self"}
        )

    def log(self, name: str, value: Tensor, prog_bar: bool = False) -> None:
        self.logged[name] = value.detach()


class Classifier(Module):
    """Rows of 9 numbers -> 4 classes."""

    def __init__(
        self, hidden: int = 17, lr: float = 0.05, smoothing: float = 0.1, gamma: float = 0.7
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(9, hidden), nn.GELU(), nn.LayerNorm(hidden))
        self.body = nn.Sequential(
            nn.Linear(hidden, 2 * hidden + 1), nn.GELU(), nn.Linear(2 * hidden + 1, hidden)
        )
        self.head = nn.Linear(hidden, 4)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=smoothing)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        return self.head(z + self.body(z))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = self.criterion(logits, y)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_acc", (logits.argmax(dim=1) == y).float().mean())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("val_loss", loss)
        self.log("val_acc", (logits.argmax(dim=1) == y).float().mean())
        return loss

    def configure_optimizers(self) -> tuple[list[Any], list[Any]]:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=self.hparams.gamma)]


class Rows(torch.utils.data.TensorDataset):
    """Rows [9] and which of four directions they lie in."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(count, 9, generator=generator)
        super().__init__(x, (x @ torch.randn(9, 4, generator=torch.Generator().manual_seed(0))).argmax(1))


# --- What a trainer of Lightning's does with it, by hand.


def script(
    model: Classifier, batch_size: int, steps: int, every: int, precision: torch.dtype
) -> tuple[list[float], list[float]]:
    """Losses of the steps and of the validations (the mean over all rows)."""

    def batches(rows: Rows) -> Any:
        return ([x.to(precision), y] for x, y in torch.utils.data.DataLoader(rows, batch_size=batch_size))

    (optimizer,), (scheduler,) = model.configure_optimizers()
    losses, validations = [], []
    for step, batch in enumerate(batches(Rows(batch_size * steps, 1))):
        loss = model.training_step(batch, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(model.logged["train_loss"]))
        if (step + 1) % every == 0 or step + 1 == steps:
            model.eval()
            total, count = 0.0, 0
            with torch.no_grad():
                for index, batch in enumerate(batches(Rows(23, 2))):
                    total += float(model.validation_step(batch, index)) * len(batch[0])
                    count += len(batch[0])
            model.train()
            validations.append(total / count)
    return losses, validations


# --- The job that it becomes.


def configured(named: list[tuple[str, nn.Parameter]], hparams: SimpleNamespace) -> torch.optim.Optimizer:
    """`configure_optimizers` over the parameters that are handed in; the optimizer remembers its
    scheduler."""
    stand_in: Any = SimpleNamespace(
        hparams=hparams, parameters=lambda: [each for _, each in named], named_parameters=lambda: iter(named)
    )
    (optimizer,), (scheduler,) = Classifier.configure_optimizers(stand_in)
    optimizer.its_scheduler = scheduler  # type: ignore[attr-defined]
    return optimizer


def job(batch_size: int = 8, steps: int = 5, every: int = 2) -> ml.Job:
    hparams = Classifier().hparams
    return ml.Job(
        model=Classifier,
        loss=lambda model, batch: model.training_step(batch, 0),
        optimizer=lambda named: configured(named, hparams),
        data=lambda: Rows(batch_size * steps, 1),
        batch_size=batch_size,
        steps=steps,
        shuffle=False,
        scheduler=lambda optimizer: optimizer.its_scheduler,
        evaluate=ml.Evaluate(
            lambda: Rows(23, 2), {"loss": lambda model, batch: model.validation_step(batch, 0)}, every=every
        ),
    )
