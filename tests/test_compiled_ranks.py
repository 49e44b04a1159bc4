"""`compile=true` where every rank is a process: equal to one device that compiles nothing, also at lower precision, with
evaluations between steps, after a resume, and for batches of other sizes."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tqdm import tqdm

import meshloom as ml
from meshloom.core.plan import Plan
from meshloom.program.run import regions
from meshloom.train.trainer import Trainer
from meshloom.verify.run import verify
from tests.jobs import class_loss, make_job, vectors
from tests.processes import on_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
PLANS = {
    "dp=2": 2, "dp=2,zero=3": 2, "pp=2,microbatches=2": 2, "tp=2": 2, "dp=2,pp=2,tp=2,microbatches=2": 8,
}  # fmt: skip


def _lock_within_process() -> None:
    """torch makes progress bars in compiling; the lock that they share between processes would be left by ranks, which
    end at once."""
    tqdm.set_lock(threading.RLock())


def _verified(plan: str, precision: str) -> list[str]:
    """What is not equal. The third step has a short batch."""
    _lock_within_process()
    regions.LEAST_OPERATORS = 2  # those of a tiny model
    dtype = torch.float64 if precision == "float32" else None
    text = f"{plan},compile=true,precision={precision}"
    report = verify(make_job("gpt", "adamw"), Plan.parse(text), devices="cpu", steps=3, dtype=dtype)
    if report is None:
        return []
    return [f"{e.kind} {e.name} {e.error}" for s in report.steps for e in s.errors if not e.passed]


@pytest.mark.parametrize("precision", ["float32", "bf16-mixed"])
@pytest.mark.parametrize("plan", PLANS)
def test_processes_equal_one_device(plan: str, precision: str):
    wrong = on_ranks(_verified, PLANS[plan], plan, precision, timeout_seconds=1000.0)
    assert wrong == [[]] * PLANS[plan]


def _trained(plan: str, out: str, stop: int | None) -> tuple[list[float], dict[str, float]]:
    """The losses, and the last evaluation. stop: the step after which a checkpoint ends the run, and it is resumed."""
    _lock_within_process()
    regions.LEAST_OPERATORS = 2
    job = replace(
        make_job("mlp", "adamw"), evaluate=ml.Evaluate(partial(vectors, 10), {"loss": class_loss}, every=2)
    )
    losses: list[float] = []
    evaluated: dict[str, float] = {}
    for steps, resume in ((stop, None), (5, out)) if stop else ((5, None),):
        with Trainer(
            job, Plan.parse(plan), devices="cpu", dtype=torch.float64, steps=steps, out=Path(out), resume=resume and Path(out), overwrite=resume is None
        ) as trainer:  # fmt: skip
            for batch in trainer.batches():
                losses.append(trainer.step(batch))
                evaluated = trainer.evaluate()
            trainer.save()
    return losses, evaluated


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2"])
def test_evaluations_and_a_resume_between_steps_change_nothing(plan: str, tmp_path: Path):
    expected, metrics = _trained("dp=1", str(tmp_path / "one"), None)
    for losses, evaluated in on_ranks(
        _trained, 2, f"{plan},compile=true", str(tmp_path / "two"), 3, timeout_seconds=1000.0
    ):
        assert losses == pytest.approx(expected, rel=1e-10)  # sums in other orders
        assert evaluated == pytest.approx(metrics, rel=1e-10)
