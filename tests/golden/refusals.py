"""What is refused, and in which words: a trigger is a Python expression in terms of what stands here.

A new one is a line of refusals.txt, under which `python -m tests.golden refusals` writes the sentence.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from meshloom import (
    Averaged,
    ByMetric,
    Circumstances,
    Evaluate,
    Job,
    Listener,
    Mesh,
    MeshloomError,
    Plan,
    Trainer,
)
from meshloom.cli.main import main
from meshloom.core.random import preserved_draws
from meshloom.pipeline.schedules.schedule import Action, Schedule
from meshloom.telemetry.progress import QUIET
from tests.golden.files import read


def sentence_of(trigger: str) -> str:
    """What the refusal says. Raises AssertionError if nothing is refused."""
    try:
        with preserved_draws():
            result = eval(trigger, dict(globals()))  # noqa: S307  from our own file
    except MeshloomError as error:
        # lines of this file move
        return re.sub(r"/\S*/refusals\.py:\d+", "refusals.py:LINE", f"{type(error).__name__}: {error}")
    raise AssertionError(f"{trigger} is not refused; it gives {result!r}")


def refusals() -> dict[str, str]:
    """Of the triggers that the file has."""
    return {trigger: sentence_of(trigger) for trigger in read("refusals")}


# --- What triggers are written with.

RIGHT_JOBS = Path(__file__).parents[1] / "bits_jobs.py"


class Two(nn.Module):
    """[batch, 3] -> [batch, 2]"""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.first(x)))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.ones(3), torch.ones(2))] * 4)


def frozen() -> nn.Module:
    return Two().requires_grad_(False)


def data(count: int = 12) -> TensorDataset:
    return TensorDataset(torch.arange(3.0 * count).reshape(count, 3) / 8, torch.ones(count, 2))


def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    x, y = batch
    return ((model(x) - y) ** 2).mean()


def sgd(named: Any) -> SGD:
    return SGD(named, lr=0.125)


def twice(named: Any) -> list[SGD]:
    return [sgd(named), sgd(named)]


class Own(SGD):
    """One whose rule is not known."""


def table() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 3, max_norm=1.0), nn.Linear(3, 2))


def taught() -> nn.Module:
    """Of which the first layer is not trained."""
    model = Two()
    model.first.requires_grad_(False)
    return model


def teaching(model: Any, batch: Sequence[Tensor]) -> Tensor:
    with torch.no_grad():
        model.first.weight.mul_(0.5)
    return loss(model, batch)


class Masked(Two):
    """Writes what is trained."""

    def forward(self, x: Tensor) -> Tensor:
        self.head.weight.data = self.head.weight.data * 0.5
        return super().forward(x)


def accuracy(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return (model(batch[0]) > 0).double().mean()


def job(**changes: Any) -> Job:
    """Small, and right but for the changes; one of None is left out."""
    settings = {
        "model": Two,
        "loss": loss,
        "optimizer": sgd,
        "data": data,
        "batch_size": 4,
        "steps": 2,
        **changes,
    }
    return Job(**{name: value for name, value in settings.items() if value is not None or name in changes})


def evaluate(**changes: Any) -> Evaluate:
    return Evaluate(**{"data": data, "metrics": {"accuracy": accuracy}, "every": 1, **changes})


def train(plan: str, given: Any = None, **arguments: Any) -> None:
    """All steps, on simulated ranks."""
    with Trainer(
        given or job(), plan, **{"devices": "simulated", "cache": "off", "listener": QUIET, **arguments}
    ) as trainer:
        trainer.fit()


def command(words: str) -> int:
    """The exit code of `meshloom`, or an error with what it says of a wrong request. EMPTY: an empty directory. JOB: a job that is right."""
    said = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as directory,
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        code = main(words.replace("EMPTY", directory).replace("JOB", f"{RIGHT_JOBS}:mlp_float32").split())
        text = said.getvalue().strip().replace(directory, "EMPTY")
    if code == 2:
        raise CommandError(text)
    return code


class CommandError(MeshloomError):
    """What a command wrote before it ended with exit code 2."""


__all__ = [
    "LBFGS",
    "Action",
    "Adafactor",
    "AdamW",
    "Averaged",
    "ByMetric",
    "Circumstances",
    "DataLoader",
    "Listener",
    "Mesh",
    "Plan",
    "Schedule",
    "StepLR",
]
