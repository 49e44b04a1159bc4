"""LightningModules as their authors write them, each trained by Lightning's Trainer: what is returned must not depend on the plan."""

from __future__ import annotations

import csv
import logging
import random
import tempfile
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import numpy
import torch
import torchmetrics
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import meshloom as ml
from meshloom.loops.part_tensor import plain
from meshloom.loops.ranks import leave_ranks

F64 = torch.float64
CASES: dict[str, Callable[[str | None], list[Any]]] = {}


def case(function: Callable[[str | None], list[Any]]) -> Callable[[str | None], list[Any]]:
    CASES[function.__name__] = function
    return function


def all_cases(plan: str | None = None, names: Collection[str] = CASES) -> dict[str, list[Any] | str]:
    """On this rank; of a case that the plan refuses, the sentence. plan: None is the library alone."""
    found: dict[str, list[Any] | str] = {}
    try:
        for name in names:
            begin()
            try:
                found[name] = CASES[name](plan)
            except ml.MeshloomError as error:
                found[name] = str(error)
    finally:
        leave_ranks(well=len(found) == len(names))
    return found


def begin() -> None:
    """All ranks alike, and quiet."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


class Order(lightning.Callback):
    """Notes every hook that is called, and what has been logged by the end of each batch."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.logged: list[dict[str, float]] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("on_", "setup", "teardown")):
            self.seen.append(name)
        return super().__getattribute__(name)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def data(rows: int = 23, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 16, generator=generator, dtype=F64)
    return TensorDataset(x, torch.randint(0, 5, (rows,), generator=generator))


def loaders(**settings: Any) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Batches of 8, 8 and 7; whole ones to validate by."""
    given: Any = {"shuffle": True, **settings}
    return DataLoader(data(), batch_size=8, **given), DataLoader(data(11, 2), batch_size=4)


def trainer(plan: str | None, *callbacks: Any, **settings: Any) -> lightning.Trainer:
    if plan is not None:
        settings["strategy"] = ml.lightning.Strategy(plan, module=settings.pop("module", None))
    settings.pop("module", None)
    quiet: Any = {
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "max_epochs": 2,
        "num_sanity_val_steps": 1,
    }  # fmt: skip
    return lightning.Trainer(callbacks=list(callbacks), **{**quiet, **settings})


class Net(nn.Sequential):
    def __init__(self, outputs: int = 5) -> None:
        super().__init__(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


class Classifier(lightning.LightningModule):
    """A network, a parameter beside it, metrics, and a schedule."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = Net()
        self.scale = nn.Parameter(torch.ones(3))
        self.read = torchmetrics.Accuracy(task="multiclass", num_classes=5)
        self.average = torchmetrics.MeanMetric()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale.mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        scores = self.net(x) * self.scale.mean()
        loss = F.cross_entropy(scores, y)
        self.read(scores, y)
        self.average(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("read", self.read, on_step=True, on_epoch=True)
        self.log("average", self.average, on_step=False, on_epoch=True)
        self.log("ones", (y == 1).double().sum(), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("most", scores.max(), reduce_fx="max", on_step=True, on_epoch=True, batch_size=len(x))
        return {"loss": loss, "scores": scores.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.read(self(x), y)
        self.log("held_out", F.cross_entropy(self(x), y))
        self.log("held_out_read", self.read)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def size_of(module: nn.Module) -> float:
    with ml.whole(module):
        return sum(float(each.detach().double().square().sum()) for each in module.parameters())


@case
def metrics_files_and_the_order_of_callbacks(plan: str | None) -> list[Any]:
    module, order, root = Classifier(), Order(), Path(tempfile.mkdtemp())
    kept = ModelCheckpoint(save_top_k=2, monitor="held_out", save_last=True)
    ours = trainer(
        plan, order, kept, logger=CSVLogger(root, flush_logs_every_n_steps=1), log_every_n_steps=1, gradient_clip_val=0.5, default_root_dir=root,
        enable_checkpointing=True,
    )  # fmt: skip
    ours.fit(module, *loaders())
    read = ours.validate(module, loaders()[1], verbose=False)
    files = sorted(str(each.relative_to(root)) for each in root.rglob("*") if each.is_file())
    found = [order.logged, order.seen, read, size_of(module), float(kept.best_model_score or 0)]
    if not ml.main:  # which has no files
        return found
    with open(root / "lightning_logs/version_0/metrics.csv") as file:
        return [*found, files, [dict(sorted(row.items())) for row in csv.DictReader(file)]]


@case
def parameters_beside_a_network_of_batches_of_one_size(plan: str | None) -> list[Any]:
    module, order = Classifier(), Order()
    trainer(plan, order, max_epochs=1).fit(module, loaders(drop_last=True)[0])
    return [order.logged, order.seen, size_of(module)]


class Whole(Classifier):
    """Calls itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss


@case
def a_module_that_calls_itself_and_accumulates(plan: str | None) -> list[Any]:
    module, order = Whole(), Order()
    clipped: Any = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}
    trainer(plan, order, accumulate_grad_batches=2, **clipped).fit(module, *loaders())
    again = trainer(plan, order, max_epochs=1)
    again.fit(module, *loaders(shuffle=False))
    ones: Any = torch.ones(3, 16, dtype=F64)
    scores: Any = again.predict(module, DataLoader(ones))
    return [order.logged, order.seen, size_of(module), float(torch.cat(scores).sum())]


class Adversaries(lightning.LightningModule):
    """Two optimizers, stepped by hand, each with the other's parameters frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.maker, self.judge = Net(16), Net(1)
        self.temperature = nn.Parameter(torch.ones(2))
        self.automatic_optimization = False
        self.double()

    def judged(self, x: Tensor, truth: float) -> Tensor:
        scores = self.judge(x) * self.temperature.sum()
        return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, truth))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        of_maker, of_judge = optimizers
        for optimizer in (of_judge, of_maker):
            self.toggle_optimizer(optimizer)
            made = self.maker(batch[0])
            if optimizer is of_judge:
                loss = self.judged(batch[0], 1.0) + self.judged(made.detach(), 0.0)
            else:
                loss = self.judged(made, 1.0)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.log(f"loss_{optimizer is of_judge}", loss)

    def configure_optimizers(self) -> Any:
        judge = [*self.judge.parameters(), self.temperature]
        return torch.optim.Adam(self.maker.parameters(), lr=1e-2), torch.optim.Adam(judge, lr=1e-2)


class Prepared(lightning.LightningDataModule):
    def prepare_data(self) -> None:
        (Path(tempfile.gettempdir()) / "prepared").write_text("by one process of a host")

    def setup(self, stage: str) -> None:
        assert (Path(tempfile.gettempdir()) / "prepared").exists()

    def train_dataloader(self) -> Any:
        return loaders()[0]


@case
def two_optimizers_by_hand(plan: str | None) -> list[Any]:
    module, order = Adversaries(), Order()
    trainer(plan, order).fit(module, datamodule=Prepared())
    return [order.logged, order.seen, size_of(module)]


@case
def averages_of_weights(plan: str | None) -> list[Any]:
    found = list[Any]()
    for average in (EMAWeightAveraging(decay=0.8), StochasticWeightAveraging(1e-2, swa_epoch_start=1)):
        module, order = Classifier(), Order()
        trainer(plan, average, order, max_epochs=3).fit(module, *loaders())
        found += [order.logged, size_of(module)]
    return found


@case
def half_precision(plan: str | None) -> list[Any]:
    """Rounded: the sums of shares have another order."""
    module, order = Classifier().float(), Order()
    train: Any = [(x.float(), y) for x, y in data()]
    trainer(plan, order, precision="bf16-mixed").fit(module, DataLoader(train, batch_size=8))
    return [[round(each["loss_step"], 1) for each in order.logged]]


def saved(plan: str | None, path: str) -> float:
    """A checkpoint of five steps; the share of parameters that this rank holds."""
    begin()
    try:
        module = Classifier()
        ours = trainer(plan, max_steps=5, max_epochs=-1)
        ours.fit(module, loaders(shuffle=False)[0])
        ours.save_checkpoint(path)
        held = sum(plain(each.detach()).numel() for each in module.parameters())
        return held / sum(each.numel() for each in module.parameters())
    finally:
        leave_ranks(well=True)


def resumed(path: str | None, plan: str | None = None) -> list[Any]:
    """The parameters after ten steps, from this checkpoint on or from the beginning."""
    begin()
    module = Classifier()
    trainer(plan, max_steps=10, max_epochs=-1).fit(
        module, loaders(shuffle=False)[0], ckpt_path=path, weights_only=False
    )
    with ml.whole(module):
        return [each.detach().tolist() for each in module.parameters()]
