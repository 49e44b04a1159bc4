"""Evaluations compared number by number: what is allowed before rounding is measured, and what it is then."""

from __future__ import annotations

import pytest

from meshloom.verify.reference.evaluation import EvaluatedChunk
from meshloom.verify.tolerances.evaluation_errors import (
    OF_METRICS,
    EvaluationTolerances,
    chunk_errors,
    metric_errors,
)
from tests.planted.bugs import verified

UNMEASURED = 3.8e-6


def chunk(number: int, value: float) -> EvaluatedChunk:
    return EvaluatedChunk(batch=0, chunk=number, sums={"loss": (value, 3.0)})


RIGHT = [chunk(0, 3.0), chunk(1, 6.0)]


def tolerances_of(calls: list[int]) -> EvaluationTolerances:
    """Perturbations move the first chunk by 1e-5 of it, and the second not at all."""

    def moved(number: int) -> list[EvaluatedChunk]:
        calls.append(number)
        return [chunk(0, 3.0 * (1 + 1e-5)), RIGHT[1]]

    return EvaluationTolerances(right=RIGHT, unmeasured=UNMEASURED, times=OF_METRICS, moved=moved)


def test_what_is_within_some_units_needs_no_measuring():
    errors = metric_errors({"loss": 1.5 * (1 + 3e-6)}, RIGHT, tolerances_of(calls := []), 0)
    assert all(each.passed for each in errors) and not calls


def test_a_chunk_may_be_off_by_twice_what_moves_any():
    tolerances = tolerances_of(calls := [])
    # errors of two chunks that cancel in the mean
    ours = [chunk(0, 3.0 + 2e-4), chunk(1, 6.0 - 2e-4)]
    mean, of_chunk = metric_errors({"loss": 1.5}, ours, tolerances, 0)
    assert mean.passed and mean.error == 0.0
    assert of_chunk.name == "loss of chunk 0 of batch 0" and not of_chunk.passed
    # 3e-5 of a chunk of 3, where chunks are 4.5 on average
    assert of_chunk.tolerance == pytest.approx(2 * 1e-5 * 3 / 4.5)
    assert calls == [*range(6)]  # until twelve chunks have moved
    ours = [RIGHT[0], chunk(1, 6.0 * (1 + 1.2e-5))]
    assert all(each.passed for each in metric_errors({"loss": 1.5}, ours, tolerances, 0))


def test_chunks_that_are_missing_are_not_numbers():
    assert [each.chunk for each, _ in chunk_errors(RIGHT[:1], RIGHT, "loss")] == [0]


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
