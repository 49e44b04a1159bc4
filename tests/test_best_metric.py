"""The checkpoint of the best evaluation, stopping early, and several listeners of one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshloom as ml
from meshloom.checkpoint.checkpoint import Checkpoint, find
from meshloom.core.errors import CheckpointError, JobError, PlanError
from meshloom.core.job import Evaluate, Job
from meshloom.telemetry.best_metric import BestMetric
from meshloom.telemetry.progress import Listener
from tests.fitted import fitted
from tests.jobs import vectors
from tests.logging_jobs import logging_job

SCORES = [1.0, 3.0, 2.0, 3.0, 2.5, 9.0]  # after steps 1 to 6


def score(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """What `SCORES` says of the step."""
    away = (torch.arange(1.0, 7.0) - ml.step()).abs()
    return ((away < 0.5) * torch.tensor(SCORES)).sum() + 0.0 * batch["x"].sum()


def job(**overrides: Any) -> Job:
    evaluate = {"data": vectors, "metrics": {"score": score}, "every": 1, "best": "score:max", "patience": 3}
    return logging_job(steps=6, evaluate=Evaluate(**{**evaluate, **overrides}))


def quiet(**functions: Any) -> Listener:
    return Listener(**{"started": str, "note": str, **functions})


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "pp=2,microbatches=2"])
@pytest.mark.slow
def test_training_stops_and_the_best_is_kept(plan: str, tmp_path: Path):
    """Best after step 2; the equal value after step 4 is no better one."""
    notes: list[str] = []
    with ml.Trainer(job(), plan, out=tmp_path, listener=quiet(note=notes.append)) as trainer:
        summary = trainer.fit()
        assert trainer.next_step == summary.steps == 5
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["step-00000002"]
    assert Checkpoint.open(tmp_path / "best").step == 2 and Checkpoint.open(tmp_path).step == 5
    said = "Training ends after step 5 of 6: score has not become better in 3 evaluations since step 2 (3), and patience=3."
    assert said in notes


@pytest.mark.slow
def test_what_was_waited_for_is_resumed_under_another_plan(tmp_path: Path):
    """A run of 3 steps has waited once; resumed, it ends after two more."""
    fitted(job(), "dp=2", steps=3, out=tmp_path, listener=quiet(), devices="auto")
    with ml.Trainer(job(), "pp=2,microbatches=2", out=tmp_path, resume=tmp_path, listener=quiet()) as trainer:
        trainer.fit()
        assert trainer.next_step == 5
    with pytest.raises(
        CheckpointError, match=r"is of a run that has ended: score has not .* Give Evaluate a larger patience"
    ):
        ml.Trainer(job(), "dp=2", out=tmp_path, resume=tmp_path, listener=quiet())
    fitted(job(patience=4), "dp=2", out=tmp_path, resume=tmp_path, listener=quiet(), devices="auto")
    assert find(tmp_path / "best").name == "step-00000006"


def test_a_value_that_is_no_number_is_never_best():
    best = BestMetric.of("loss:min", None)
    for step, value in enumerate([float("nan"), 2.0, float("nan"), 2.0, 1.5], start=1):
        best = best.after(step, {"loss": value})
    assert (best.step, best.value, best.waited, best.stops) == (5, 1.5, 0, False)
    assert BestMetric.of("loss:max", None).going_on(best.to_dict()).step == 5
    assert BestMetric.of("other:min", None).going_on(best.to_dict()).step == 0


def test_mistakes_are_one_sentence():
    with pytest.raises(PlanError, match="keeps no best one"):
        ml.Trainer(job(), "dp=2,exchange=async")
    with pytest.raises(JobError, match="must be a Listener of functions"):
        ml.Trainer(job(), "dp=2", listener=[quiet(), print])  # pyright: ignore[reportArgumentType]


@pytest.mark.long
def test_several_listeners_hear_every_event_in_order(tmp_path: Path):
    heard: list[tuple[str, str]] = []

    def listener(who: str) -> Listener:
        def hears(event: str) -> Any:
            return lambda *values: heard.append((who, event))

        return Listener(
            **{event: hears(event) for event in ("started", "step", "evaluated", "saved", "ended")}, note=str
        )

    fitted(job(), "dp=2", steps=2, out=tmp_path, listener=[listener("a"), listener("b")], devices="auto")
    step = ["step", "evaluated", "saved"]
    events = ["started", *step, *step, "saved", "ended"]
    assert heard == [(who, event) for event in events for who in "ab"]
