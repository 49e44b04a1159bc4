"""Jobs for asynchronous runs on processes. They sleep a little in each share, so that there is time for what
happens to them."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import meshloom as ml
from meshloom.core.jobfile import load_job
from tests.jobs import make_job


def slowly(job: ml.Job, seconds: float) -> ml.Job:
    """The same job, whose shares take so much longer."""

    def loss(model: Any, batch: Any) -> Any:
        time.sleep(seconds)
        return job.loss(model, batch)

    return replace(job, loss=loss)


def digits() -> ml.Job:
    """The rate and the momentum are those that old gradients allow (docs/asynchronous.md)."""
    job = load_job(str(Path(__file__).parents[1] / "examples" / "02_digits.py"))
    assert job and job.evaluate
    return replace(
        job,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.5, weight_decay=1e-4),
        evaluate=replace(job.evaluate, every=500),
    )


def slow_digits() -> ml.Job:
    return slowly(digits(), 0.2)


def hasty_digits() -> ml.Job:
    return slowly(digits(), 0.03)


steady = slowly(make_job("mlp", "adamw", steps=40), 0.05)


def failing() -> ml.Job:
    """Its third share fails."""
    shares: list[int] = []

    def loss(model: Any, batch: Any) -> Any:
        shares.append(1)
        if len(shares) == 3:
            raise ValueError("a broken share")
        return steady.loss(model, batch)

    return replace(steady, loss=loss)


def dying() -> ml.Job:
    """Whoever computes a share dies of it."""

    def loss(model: Any, batch: Any) -> Any:
        os._exit(7)

    return replace(steady, loss=loss)
