"""Evaluations compared number by number: what is allowed before rounding is measured, and what it is then."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from meshloom.core.plan import Plan
from meshloom.verify.reference.between_steps.evaluation import EvaluatedChunk, MetricPlace
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.step_records import ModuleOutput
from meshloom.verify.tolerances import evaluation_errors
from meshloom.verify.tolerances.evaluation_errors import (
    EvaluationTolerances,
    chunk_errors,
    metric_errors,
    output_distance,
)
from tests.jobs import make_job
from tests.planted.bugs import verified

UNMEASURED = 3.8e-6


def chunk(number: int, value: float, *sample: float) -> EvaluatedChunk:
    output = ModuleOutput(name="head", call=0, total=0.0, square=sum(each**2 for each in sample), count=len(sample), sample=sample)  # fmt: skip
    outputs = {"loss": [output]} if sample else {}
    return EvaluatedChunk(batch=0, chunk=number, sums={"loss": (value, 3.0)}, outputs=outputs)


RIGHT = [chunk(0, 3.0, 1.0, 2.0), chunk(1, 6.0)]


@pytest.fixture
def tolerances(monkeypatch: pytest.MonkeyPatch) -> EvaluationTolerances:
    """Perturbations move the first chunk by 1e-5 of it, its output by 2e-6, and the second not at all."""
    moved = [chunk(0, 3.0 * (1 + 1e-5), 1.0, 2.0 + 2e-6 * math.sqrt(5)), RIGHT[1]]
    calls: list[int] = []

    def again() -> list[EvaluatedChunk]:
        calls.append(1)
        return moved

    reference: Any = Reference(make_job("mlp", "sgd"), Plan.parse("dp=2"), None, torch.device("cpu"), ())
    found = EvaluationTolerances(
        reference=reference, right=RIGHT, unmeasured=UNMEASURED, lower=None, again=again
    )
    monkeypatch.setattr(found, "calls", calls, raising=False)
    return found


def test_what_is_within_some_units_needs_no_measuring(tolerances: Any):
    errors = metric_errors({"loss": 1.5 * (1 + 3e-6)}, RIGHT, tolerances, 0)
    assert all(each.passed for each in errors) and not tolerances.calls


def test_a_chunk_may_be_off_by_twice_what_moves_any(tolerances: Any):
    # errors of two chunks that cancel in the mean
    ours = [chunk(0, 3.0 + 2e-4), chunk(1, 6.0 - 2e-4)]
    mean, of_chunk = metric_errors({"loss": 1.5}, ours, tolerances, 0)
    assert mean.passed and mean.error == 0.0
    assert of_chunk.name == "loss of chunk 0 of batch 0" and not of_chunk.passed
    # 3e-5 of a chunk of 3, where chunks are 4.5 on average
    assert of_chunk.tolerance == pytest.approx(2 * 1e-5 * 3 / 4.5)
    assert len(tolerances.calls) == 6  # until twelve chunks have moved
    ours = [RIGHT[0], chunk(1, 6.0 * (1 + 1.2e-5))]
    assert all(each.passed for each in metric_errors({"loss": 1.5}, ours, tolerances, 0))


def test_an_output_may_be_off_by_eight_times_what_it_moves(tolerances: Any):
    place = MetricPlace(batch=0, chunk=0, metric="loss")
    assert tolerances.of_output(place, 0, 1e-5) == pytest.approx(1.6e-5, rel=1e-3)
    assert tolerances.of_output(place, 0, 1e-6) == UNMEASURED


def test_samples_are_compared_one_by_one():
    (right,) = RIGHT[0].outputs["loss"]
    assert output_distance(right, right) == 0.0
    moved = replace(right, sample=(1.0 + 3e-5, 2.0 - 3e-5))  # which leaves their sum
    assert output_distance(moved, right) == pytest.approx(3e-5 * math.sqrt(2 / 5))
    assert output_distance(replace(right, count=3), right) == math.inf
    assert output_distance(replace(right, sample=()), right) == 0.0
    masked = replace(right, sample=(-math.inf, 2.0), square=math.inf)
    assert output_distance(masked, masked) == 0.0
    assert output_distance(replace(masked, sample=(1.0, 2.0)), masked) == math.inf


def test_chunks_that_are_missing_are_not_numbers():
    assert [place.chunk for place, _ in chunk_errors(RIGHT[:1], RIGHT, "loss")] == [0]
    assert list(evaluation_errors.watched([], RIGHT)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "precision"),
    [
        (plan, precision)
        for plan in ("dp=2,microbatches=2", "pp=2,microbatches=2", "tp=2", "dp=2,zero=3")
        for precision in ("bf16-mixed", "bf16", "fp16-mixed", "float32")
    ],
)
def test_right_evaluations_in_low_precisions_pass(plan: str, precision: str):
    report = verified("plain", f"{plan},precision={precision}")
    wrong = [*report.steps, *report.between]
    assert report.passed, [each.errors for each in wrong if not each.passed]
