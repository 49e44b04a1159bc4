"""Plans on processes equal one device: every two settings; every three in the slow tests."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.verify.run import verify
from tests.covering import Case, covering
from tests.jobs import MODELS, OPTIMIZERS, images, make_job, texts, vectors
from tests.processes import on_ranks

SETTINGS: dict[str, list[Any]] = {
    "dp": [1, 2, 3, 4, 8],
    "microbatches": [1, 2, 5],
    "zero": [0, 1],
    "shares": ["even", "uneven", "empty"],
    "model": MODELS,
    "optimizer": OPTIMIZERS,
}
DATA = {"cnn": images, "gpt": texts}


def plan_of(case: Case) -> Plan:
    """The plan; buckets are small, so that even these models have several."""
    return Plan(dp=case["dp"], microbatches=case["microbatches"], zero=case["zero"], bucket_bytes=600)


def job_of(case: Case) -> Job:
    """Three steps, the last of which has a short batch."""
    chunks = case["dp"] * case["microbatches"]
    sizes = {"even": 2 * chunks, "uneven": 2 * chunks + max(1, chunks - 1), "empty": max(1, chunks // 2)}
    batch = sizes[case["shares"]]
    data = partial(DATA.get(case["model"], vectors), 2 * batch + max(1, batch // 2))
    return make_job(case["model"], case["optimizer"], batch_size=batch, data=data)


def wrong(cases: list[Case]) -> list[str] | None:
    """A line for each case that differs, in float64; None on ranks that do not report."""
    reports = [
        (case, verify(job_of(case), plan_of(case), devices="cpu", steps=3, dtype=torch.float64))
        for case in cases
    ]
    if reports[-1][1] is None:
        return None
    return [f"{case}: {report.worst(1)}" for case, report in reports if report and not report.passed]


@pytest.mark.processes
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("dp", "strength"),
    [
        pytest.param(dp, strength, marks=() if (dp, strength) == (3, 2) else pytest.mark.slow)
        for strength in (2, 3)
        for dp in SETTINGS["dp"][1:]
    ],
)
@pytest.mark.every
def test_plans_on_processes_equal_one_device(dp: int, strength: int) -> None:
    candidates = {2: 60, 3: 20}[strength]
    cases = [each for each in covering(SETTINGS, strength, candidates=candidates) if each["dp"] == dp]
    assert on_ranks(wrong, dp, cases, timeout_seconds=1100.0)[0] == []
