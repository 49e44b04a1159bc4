"""Verification of a job that saves in the background does so, too: while the next step runs, and with everything that may be copied late left
for training to copy."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from meshloom.checkpoint.writing.host_copy import HostCopy
from meshloom.core.job import Evaluate, Job
from meshloom.core.plan import Plan
from meshloom.train.run_checkpoints import RunCheckpoints
from meshloom.verify import verified_run
from meshloom.verify.findings import Report
from meshloom.verify.run import verify
from tests.covering import few
from tests.jobs import make_job
from tests.processes import on_ranks

WHAT = "the checkpoint written in the background while the next step ran"
PLANS = ["dp=2", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2", "dp=2,offload=optimizer"]


def wide() -> nn.Module:
    """Whose state is large enough for a file."""
    return nn.Sequential(
        nn.Linear(7, 150), nn.BatchNorm1d(150), nn.GELU(), nn.Linear(150, 150), nn.Linear(150, 5)
    )


def job_of() -> Job:
    job = make_job("mlp", "adamw", batch_size=13, steps=40)
    job = replace(job, model=wide, checkpoint="background", checkpoint_every=2, average=0.9)
    metrics = {"loss": lambda model, batch: job.loss(model, batch)}
    return replace(job, evaluate=Evaluate(data=job.data, metrics=metrics, every=2))


def verified(plan: str, devices: str = "simulated", dtype: torch.dtype | None = None) -> Report | None:
    return verify(job_of(), Plan.parse(plan), devices=devices, dtype=dtype, quick=False)


@pytest.mark.parametrize("dtype", few([None, torch.float64], rest=pytest.mark.slow))
@pytest.mark.parametrize("plan", few(PLANS, rest=pytest.mark.slow))
@pytest.mark.long
def test_a_checkpoint_in_the_background_has_the_same_bits(plan: str, dtype: torch.dtype | None):
    report = verified(plan, dtype=dtype)
    assert report and report.passed, report and report.worst()
    assert sum(each.what.startswith(WHAT) for each in report.between) == 1


@pytest.mark.processes
def test_ranks_in_processes_write_it_as_well():
    one, other = on_ranks(_on_a_rank, 2)
    assert other is None and any(each.startswith(WHAT) for each in one)


def _on_a_rank() -> list[str] | None:
    report = verified("dp=2,zero=1", "cpu")
    assert report is None or report.passed
    return report and [each.what for each in report.between]


def no_waiting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunCheckpoints, "_finish_copy", lambda self, rank: self._copying.pop(rank, None))


def one_is_left(patch: pytest.MonkeyPatch) -> None:
    def finish(self: Any) -> None:
        while len(self._left) > 1:
            self._copy_one()

    patch.setattr(HostCopy, "finish", finish)


@pytest.mark.parametrize(
    ("plant", "plan"),
    [
        (no_waiting, "dp=2"),
        (one_is_left, "dp=2,zero=1"),
    ],
)
@pytest.mark.slow
def test_mistakes_in_copying_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], plan: str, monkeypatch: pytest.MonkeyPatch
):
    plant(monkeypatch)
    report = verified(plan)
    assert report and not report.passed and all(each.passed for each in report.steps)
    [wrong] = [each for each in report.between if not each.passed]
    assert wrong.what.startswith(WHAT) and wrong.facts


@pytest.mark.slow
def test_what_a_closed_trainer_holds_is_free_before_the_next_one_opens(monkeypatch: pytest.MonkeyPatch):
    held: list[weakref.ref[Any]] = []
    alive: list[int] = []

    class Watched(verified_run.Trainer):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            alive.append(sum(each() is not None for each in held))
            super().__init__(*arguments, **settings)
            held.extend(weakref.ref(each.model) for each in self.replicas)

    monkeypatch.setattr(verified_run, "Trainer", Watched)
    report = verified("dp=2")
    assert report and report.passed
    assert len(alive) >= 3 and not any(alive), alive
