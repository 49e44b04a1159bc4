"""The digits with four workers of which one is three times slower: it sleeps three times as long for every
sample, so that four workers mean something on two cores.

`waiting` is for plans whose steps wait for all workers, `pushing` for asynchronous ones: old gradients ask
for a smaller rate and little momentum.
"""

from __future__ import annotations

import json
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
SECONDS_PER_SAMPLE = 0.004
TIMES_SLOWER = 3
SLOW = 3  # the number of the worker


def _number() -> int | None:
    """Of this process among the workers; None: it is none, and does not sleep (it evaluates)."""
    if "RANK" in (launched := json.loads(os.environ.get("MESHLOOM_LAUNCHED", "{}"))):
        return int(launched["RANK"])
    role = json.loads(os.environ.get("MESHLOOM_ROLE", "{}"))
    return role["number"] if role.get("kind") == "worker" else None


def _slept(rate: float, momentum: float, every: int, steps: int) -> ml.Job:
    job, number = load_job(str(EXAMPLE)), _number()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        if number is not None:
            time.sleep(len(batch["digit"]) * SECONDS_PER_SAMPLE * (TIMES_SLOWER if number == SLOW else 1))
        return job.loss(model, batch)

    assert job and job.evaluate
    return replace(
        job,
        loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=rate, momentum=momentum, weight_decay=1e-4),
        evaluate=replace(job.evaluate, every=every),
        steps=steps,
    )


def waiting() -> ml.Job:
    """Evaluated every 5 steps of 64 samples."""
    return _slept(0.1, 0.9, 5, 400)


def pushing() -> ml.Job:
    """Evaluated every 20 updates of 16 samples."""
    return _slept(0.05, 0.5, 20, 1600)
