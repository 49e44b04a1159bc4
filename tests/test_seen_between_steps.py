"""Mistakes in what a run reports and keeps, each planted in a contract, are seen by verification."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshloom as ml
from meshloom.checkpoint.writing import saving
from meshloom.core import random as draws
from meshloom.optimizer.updater import Updater
from meshloom.parameters import model
from meshloom.telemetry.best_metric import BestMetric
from meshloom.train.run_checkpoints import RunCheckpoints
from meshloom.verify.findings import Report, lines_of
from tests.jobs import make_job, vectors
from tests.verified import report_on


def two_groups(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    weights, biases = ([each for name, each in named if name.endswith(end)] for end in ("weight", "bias"))
    return torch.optim.SGD([{"params": weights, "lr": 0.1}, {"params": biases, "lr": 0.05}])


def score(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]).argmax(1) == batch["y"]).float().mean()


def job(**overrides: Any) -> ml.Job:
    return replace(make_job("mlp", "sgd", steps=6), optimizer=two_groups, scheduler=None, **overrides)


def kept() -> ml.Job:
    return job(evaluate=ml.Evaluate(lambda: vectors(10), {"score": score}, 1, best="score:max", patience=1))


def verified(given: ml.Job, plan: str = "dp=2", *, quick: bool = False) -> Report:
    return report_on(given, plan, steps=3, quick=quick, dtype=None)


def check_seen(report: Report, words: str) -> None:
    assert not report.passed
    assert any(words in line for line in lines_of(report)), lines_of(report)


@pytest.mark.long
def test_the_rate_of_the_first_group_for_all(monkeypatch: pytest.MonkeyPatch):
    assert verified(job(), quick=True).passed
    right: Callable[[Updater], list[float]] = Updater.learning_rates
    monkeypatch.setattr(Updater, "learning_rates", lambda self: right(self)[:1] * len(right(self)))
    check_seen(
        verified(job(), quick=True),
        "learning rate 1, as it is reported, is 0.1 after step 0, and 0.05 on one device.",
    )


@pytest.mark.slow
def test_rightly_kept_checkpoints_are_a_line():
    report = verified(kept())
    assert report.passed and "Which of 4 checkpoints are kept: equal" in lines_of(report)


@pytest.mark.slow
def test_one_checkpoint_more_than_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    right: Any = saving._commit  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(saving, "_commit", lambda *given: right(*given[:4], given[4] + 1, given[5]))
    check_seen(verified(kept()), "With keep_checkpoints=2, ")


@pytest.mark.long
def test_the_oldest_checkpoints_are_kept(monkeypatch: pytest.MonkeyPatch):
    right = saving.committed
    monkeypatch.setattr(saving, "committed", lambda directory: right(directory)[::-1])
    check_seen(verified(job()), "With keep_checkpoints=2, ")


@pytest.mark.slow
def test_best_is_the_newest(monkeypatch: pytest.MonkeyPatch):
    def after(self: BestMetric, step: int, metrics: dict[str, float]) -> BestMetric:
        return replace(self, value=metrics[self.metric], step=step, waited=0)

    monkeypatch.setattr(BestMetric, "after", after)
    check_seen(verified(kept()), "best/ holds step-")


@pytest.mark.long
def test_best_is_never_replaced(monkeypatch: pytest.MonkeyPatch):
    right = RunCheckpoints.save

    def save(self: RunCheckpoints, step: int, *, best: bool = False, **given: Any) -> Any:
        there = self._out is not None and any((self._out / "best").glob("step-*"))  # pyright: ignore[reportPrivateUsage]
        return None if best and there else right(self, step, best=best, **given)

    monkeypatch.setattr(RunCheckpoints, "save", save)
    check_seen(verified(kept()), "and the best evaluation was after step")


@pytest.mark.long
def test_a_seed_without_effect_on_initial_values(monkeypatch: pytest.MonkeyPatch):
    given = job(seed=5)
    assert verified(given, quick=True).passed
    right = draws.model_seed
    monkeypatch.setattr(model, "model_seed", lambda seed: right(0))
    check_seen(verified(given, quick=True), "DIFFERS from step 0 on")
