"""Mistakes in what a run reports, each planted in a contract, are seen by verification."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import meshloom as ml
from meshloom.core import random as draws
from meshloom.core.plan import Plan
from meshloom.optimizer.updater import Updater
from meshloom.parameters import model
from meshloom.verify.findings import Report, lines_of
from meshloom.verify.run import verify
from tests.jobs import make_job


def two_groups(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    weights, biases = ([each for name, each in named if name.endswith(end)] for end in ("weight", "bias"))
    return torch.optim.SGD([{"params": weights, "lr": 0.1}, {"params": biases, "lr": 0.05}])


def job(**overrides: Any) -> ml.Job:
    return replace(make_job("mlp", "sgd", steps=6), optimizer=two_groups, scheduler=None, **overrides)


def verified(given: ml.Job) -> Report:
    report = verify(given, Plan(dp=2), devices="simulated", steps=3)
    assert report is not None
    return report


def check_seen(report: Report, words: str) -> None:
    assert not report.passed
    assert any(words in line for line in lines_of(report)), lines_of(report)


@pytest.mark.long
def test_the_rate_of_the_first_group_for_all(monkeypatch: pytest.MonkeyPatch):
    assert verified(job()).passed
    right: Callable[[Updater], list[float]] = Updater.learning_rates
    monkeypatch.setattr(Updater, "learning_rates", lambda self: right(self)[:1] * len(right(self)))
    check_seen(
        verified(job()),
        "learning rate 1, as it is reported, is 0.1 after step 0, and 0.05 on one device.",
    )


@pytest.mark.long
def test_a_seed_without_effect_on_initial_values(monkeypatch: pytest.MonkeyPatch):
    given = job(seed=5)
    assert verified(given).passed
    right = draws.model_seed
    monkeypatch.setattr(model, "model_seed", lambda seed: right(0))
    check_seen(verified(given), "DIFFERS from step 0 on")
