"""Verification of a loss scale that begins too large for any update: steps are taken until one is made, and the scale is resumed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from meshloom.verify.findings import Report
from tests.jobs import class_loss, make_job
from tests.reports import text_of
from tests.verified import report_on

PLAN = "dp=2,precision=fp16-mixed"


def large(model: Any, batch: Any) -> torch.Tensor:
    """A loss whose gradients overflow float16 at the scales of the first steps."""
    return 3000 * class_loss(model, batch)


def report_of() -> Report:
    job = replace(make_job("mlp", "sgd"), loss=large, steps=40, clip_grad_norm=0.5)
    return report_on(job, PLAN, steps=3, quick=False, dtype=None)


@pytest.mark.long
def test_steps_are_taken_until_one_updates() -> None:
    report = report_of()
    assert report.passed, text_of(report)
    skipped = [step.skipped for step in report.steps]
    assert skipped[:3] == [True] * 3
    assert not all(skipped)
