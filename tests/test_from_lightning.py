"""`meshloom.from_lightning`: the job takes the steps of Lightning's `Trainer.fit`, is equal under other plans, and what has no
counterpart is refused by name."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import meshloom
from meshloom.core.errors import JobError
from meshloom.core.plan import Plan
from meshloom.verify.run import verify
from tests.jobs import Samples
from tests.trainer_jobs import Trained, agree, by_job

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "level", logging.ERROR)


def samples(count: int, seed: int) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    return Samples(
        x=torch.randn(count, 7, generator=generator, dtype=torch.float64),
        y=torch.randint(5, (count,), generator=generator),
    )


class Digits(lightning.LightningDataModule):
    """22 samples in batches of 4, shuffled; 7 for validation in batches of 3."""

    def setup(self, stage: str) -> None:
        self.training, self.held_out = samples(22, 1), samples(7, 2)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.training, batch_size=4, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.held_out, batch_size=3)


class Plain(lightning.LightningModule):
    """Two hidden layers; a tensor as loss, one optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 11), nn.Tanh(), nn.Linear(11, 5))
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch["x"]), batch["y"])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Validated(Plain):
    """Validations, and a schedule by epochs; a hook that reports."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores = self.net(batch["x"])
        accuracy = (scores.argmax(1) == batch["y"]).double().mean()
        self.log_dict({"val_loss": F.cross_entropy(scores, batch["y"]), "val_accuracy": accuracy})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("rate", 1.0)


class OneCycle(Plain):
    """A dict as loss; a schedule by steps, as long as the trainer says."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "more": 1}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class OnPlateau(Validated):
    """A rate that falls in each epoch whose validation is no better, as all after the first by this rule."""

    monitored = "val_loss"

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", 0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": self.monitored}


class EverySecond(Plain):
    """Schedules by every second batch and every second epoch; groups of parameters."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.net[0].parameters(), "lr": 0.2}, {"params": self.net[2:].parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        by_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        by_epoch = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
        return [optimizer], [
            {"scheduler": by_step, "interval": "step", "frequency": 2},
            {"scheduler": by_epoch, "interval": "epoch", "frequency": 2},
        ]


class Numbered(Plain):
    """A loss that depends on the number of the batch, and on that of the epoch; a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + batch_idx / 7 + self.current_epoch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.05)


class WithoutNumbers(Plain):
    """Steps that take the batch alone."""

    def training_step(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch["x"]), batch["y"])


Case = tuple[Callable[[], Plain], dict[str, Any]]
CASES: dict[str, Case] = {
    "plain": (Plain, {"max_epochs": 2}),
    "accumulated": (Plain, {"max_epochs": 2, "accumulate_grad_batches": 4}),
    "validated": (Validated, {"max_epochs": 3, "accumulate_grad_batches": 2}),
    "one_cycle": (OneCycle, {"max_steps": 9, "gradient_clip_val": 0.5}),
    "every_second": (EverySecond, {"max_epochs": 4, "accumulate_grad_batches": 2}),
    "plateau": (OnPlateau, {"max_epochs": 5}),
    "numbered": (Numbered, {"max_epochs": 2, "accumulate_grad_batches": 2}),
    "without_numbers": (WithoutNumbers, {"max_epochs": 1}),
}
QUICK = {("accumulated", "dp=2"), ("plain", "tp=2"), ("one_cycle", "pp=2")}
PAIRS = [
    pytest.param(name, plan, marks=pytest.mark.long if (name, plan) in QUICK else pytest.mark.slow)
    for name in CASES
    for plan in ("dp=2", "tp=2", "pp=2")
]


def seeded(make: Callable[[], Plain]) -> Plain:
    torch.manual_seed(7)
    module = make()
    torch.manual_seed(8)
    return module


class Notes(lightning.Callback):
    """losses: of each batch, divided by the accumulation. evaluations: without the one that checks."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.evaluations: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.evaluations.append(
                {name: float(each) for name, each in trainer.callback_metrics.items() if "val_" in name}
            )


def by_fit(name: str) -> Trained:
    """What Lightning does. losses: of each step."""
    make, settings = CASES[name]
    module, notes = seeded(make), Notes()
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[notes], **settings,
    )  # fmt: skip
    trainer.fit(module, Digits())
    per_epoch, accumulation = 6, settings.get("accumulate_grad_batches", 1)
    losses = [
        sum(notes.losses[epoch + first : epoch + min(first + accumulation, per_epoch)])
        for epoch in range(0, len(notes.losses), per_epoch)
        for first in range(0, min(per_epoch, len(notes.losses) - epoch), accumulation)
    ]
    weights = {name: each.detach().clone() for name, each in module.state_dict().items()}
    return Trained(losses=losses, weights=weights, evaluations=notes.evaluations, logged=[])


def job_of(name: str) -> meshloom.Job:
    make, settings = CASES[name]
    return meshloom.from_lightning(seeded(make), Digits(), **settings)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.long
def test_the_job_takes_the_steps_of_fit(name: str) -> None:
    found, expected = by_job(job_of(name)), by_fit(name)
    agree(found, expected, 1e-12)
    assert len(found.evaluations) >= len(expected.evaluations)
    logs = name != "without_numbers"
    assert all(("train_loss" in each) == logs for each in found.logged)


@pytest.mark.parametrize(("name", "plan"), PAIRS)
@pytest.mark.slow
def test_the_job_is_equal_under_other_plans(name: str, plan: str) -> None:
    job = job_of(name)
    report = verify(
        job, Plan.parse(plan), devices="simulated", dtype=torch.float64, steps=2, quick=job.evaluate is None
    )
    assert report is not None and report.passed, report.first_wrong


@pytest.mark.long
def test_what_is_logged_is_the_mean_over_the_microbatches_of_a_step() -> None:
    job = job_of("accumulated")
    one, two = by_job(job), by_job(job, "dp=2")
    for alone, together in zip(one.logged, two.logged, strict=True):
        torch.testing.assert_close(alone, together, rtol=1e-12, atol=0.0)
    # the first step has four batches, so its loss is the mean of what they log
    assert abs(one.logged[0]["train_loss"] - one.losses[0]) < 1e-12


def test_validations_choose_the_best_and_stop() -> None:
    job = meshloom.from_lightning(
        seeded(Validated), Digits(), max_epochs=3, check_val_every_n_epoch=2, best="val_loss:min", patience=2, seed=4
    )  # fmt: skip
    assert job.evaluate is not None
    assert (job.evaluate.every, job.evaluate.best, job.evaluate.patience) == (12, "val_loss:min", 2)
    assert (job.seed, job.steps, list(job.evaluate.metrics)) == (4, 18, ["val_loss", "val_accuracy"])


def test_a_data_loader_will_do_as_data() -> None:
    job = meshloom.from_lightning(Plain(), DataLoader(samples(9, 1), batch_size=4), max_epochs=2)
    assert (job.batch_size, job.steps, job.evaluate) == (4, 6, None)


def test_hooks_that_report_are_left_out_and_named() -> None:
    with pytest.warns(UserWarning, match="Validated.on_train_batch_end: not called, as a job has no hooks"):
        job_of("validated")


class ByHand(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnUpdate(Plain):
    def optimizer_step(self, *given: Any, **more: Any) -> None:
        super().optimizer_step(*given, **more)


class Clips(Plain):
    def configure_gradient_clipping(self, *given: Any, **more: Any) -> None:
        return None


class Remembers(Plain):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.last = outputs


class Freezes(Plain):
    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(False)


class Skips(Plain):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1


class Measures(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=5)


class Sums(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("count", torch.ones(()), reduce_fx="sum")
        return super().training_step(batch, batch_idx)


class Silent(Plain):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch["x"])


class Two(Plain):
    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.net[0].parameters(), lr=0.1),
            torch.optim.SGD(self.net[2].parameters(), lr=0.1),
        ]


class Plateau(OnPlateau):
    monitored = "train_loss"


class Asks(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.trainer.callback_metrics["x"]


class Transfers(Plain):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class LosesNothing(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


REFUSED: dict[str, tuple[Callable[[], Plain], dict[str, Any], str]] = {
    "by hand": (ByHand, {}, "automatic_optimization=False"),
    "own update": (OwnUpdate, {}, "OwnUpdate.optimizer_step has no counterpart"),
    "clips": (Clips, {}, "give gradient_clip_val"),
    "remembers": (Remembers, {}, "Remembers.on_train_batch_end does more than report: it sets .last"),
    "freezes": (Freezes, {}, "it calls requires_grad_()"),
    "skips": (Skips, {}, "may return -1"),
    "measures": (Measures, {}, "Measures.accuracy is a MulticlassAccuracy, which keeps state over batches"),
    "sums": (Sums, {}, "self.log('count', reduce_fx='sum')"),
    "silent": (Silent, {}, "Silent.validation_step logs nothing"),
    "two optimizers": (Two, {}, "returned 2 optimizers"),
    "plateau": (
        Plateau,
        {},
        "monitor='train_loss' goes by a value of training, and a job's by one of validations; validation_step logs val_loss, val_accuracy",
    ),
    "plateau elsewhere": (
        OnPlateau,
        {"check_val_every_n_epoch": 2},
        "is stepped every 1 epochs, and a job's after each validation, which is every 2",
    ),
    "asks": (Asks, {}, "self.trainer.callback_metrics has no counterpart"),
    "transfers": (Transfers, {}, "Transfers.on_after_batch_transfer has no counterpart"),
    "no loss": (LosesNothing, {}, "training_step returned None without a loss"),
    "no end": (Plain, {"max_epochs": None}, "give max_epochs=... or max_steps=..."),
    "no epochs": (Plain, {"max_epochs": 0}, "max_epochs=0"),
    "best of nothing": (Plain, {"best": "val_loss:min"}, "no validation_step with data"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_counterpart_is_refused_by_name(name: str) -> None:
    make, settings, message = REFUSED[name]
    with pytest.raises(JobError) as raised:
        by_job(meshloom.from_lightning(make(), Digits(), **{"max_epochs": 1, **settings}))
    text = str(raised.value)
    assert message in text and "\n" not in text and text.endswith("."), text


def test_what_is_no_module_of_lightning_is_refused() -> None:
    with pytest.raises(JobError, match=r"takes a lightning.pytorch.LightningModule, not a Linear"):
        meshloom.from_lightning(nn.Linear(1, 1), Digits(), max_epochs=1)


FILE = """
import lightning.pytorch as lightning
import torch
import meshloom as ml

class Lines(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
        self.log("error", loss.sqrt())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

torch.manual_seed(7)
data = torch.utils.data.DataLoader(torch.randn(22, 3), batch_size=4, shuffle=True)
job = ml.from_lightning(Lines(), data, max_epochs=2, accumulate_grad_batches=2)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_processes_equal_one_device(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(FILE)
    words = [
        "-m",
        "meshloom",
        "verify",
        str(file),
        "--plan",
        "dp=2",
        "--devices",
        "cpu",
        "--quick",
        "--steps",
        "2",
    ]
    found = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=280)
    assert found.returncode == 0 and "EQUAL" in found.stdout, found.stdout + found.stderr
