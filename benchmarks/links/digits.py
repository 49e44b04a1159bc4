"""The digits example whose loss sleeps where it trains, so that more ranks than cores mean something.

`pushing` is for workers of an asynchronous plan, as commands of their own: what they sleep, and where they
wait for each other before they begin, comes from their environment. Old gradients ask for a smaller learning
rate and less momentum (docs/asynchronous.md).
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import meshloom as ml
from meshloom.core.jobfile import load_job

EXAMPLE = Path(__file__).parents[2] / "examples" / "02_digits.py"
SLEEP, MEETING = "LABORATORY_SECONDS_PER_SAMPLE", "LABORATORY_MEETING"  # in the environment


def slept(seconds_per_sample: float, steps: int) -> ml.Job:
    """The example's, evaluated at its end."""
    job = load_job(str(EXAMPLE))
    assert job and job.evaluate

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        time.sleep(seconds_per_sample * len(batch["digit"]))
        return job.loss(model, batch)

    return replace(job, loss=loss, steps=steps, evaluate=replace(job.evaluate, every=steps))


def pushing(steps: int, samples: int) -> ml.Job:
    """The same for asynchronous updates of so many samples."""
    job = slept(float(os.environ.get(SLEEP, "0")), steps)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        _meet()
        return job.loss(model, batch)

    return replace(
        job,
        loss=loss,
        batch_size=samples,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.5, weight_decay=1e-4),
    )


def _meet() -> None:
    """Say in the folder of the meeting that this worker is there, and wait until the laboratory says that all
    are."""
    folder = Path(os.environ[MEETING])
    if not (folder / "begun").exists():
        (folder / f"here {os.getpid()}").touch()
        while not (folder / "begun").exists():
            time.sleep(0.01)
