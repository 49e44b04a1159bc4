"""Verification of a job that saves in the background does so, too, while the next step runs."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest

from meshloom.core.job import Evaluate, Job
from meshloom.core.plan import Plan
from meshloom.verify import verified_run
from meshloom.verify.findings import Report
from meshloom.verify.run import verify
from tests.jobs import averaged, make_job
from tests.processes import on_ranks

WHAT = "the checkpoint written in the background while the next step ran"


def job_of() -> Job:
    job = make_job("mlp", "adamw", batch_size=13, steps=40)
    job = averaged(replace(job, checkpoint="background", checkpoint_every=2), 0.9)
    metrics = {"loss": lambda model, batch: job.loss(model, batch)}
    return replace(job, evaluate=Evaluate(data=job.data, metrics=metrics, every=2))


def verified(plan: str, devices: str = "simulated") -> Report | None:
    return verify(job_of(), Plan.parse(plan), devices=devices, quick=False)


@pytest.mark.long
def test_a_checkpoint_in_the_background_has_the_same_bits():
    report = verified("dp=2")
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
