"""Combinations of plan, shares, model and optimizer that must equal one device: few that cover all pairs, and
more that cover any three values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.verify.run import verify
from tests.covering import Case, covering
from tests.jobs import MODELS, OPTIMIZERS, images, make_job, texts, vectors

SETTINGS: dict[str, list[Any]] = {
    "dp": [1, 2, 3, 4, 8],
    "microbatches": [1, 2, 5],
    "zero": [0, 1],
    "shares": ["even", "uneven", "empty"],
    "model": MODELS,
    "optimizer": OPTIMIZERS,
}
DATA = {"cnn": images, "gpt": texts}


@cache
def covering_cases() -> list[Case]:
    """Every two values of different settings meet."""
    return covering(SETTINGS, 2)


@cache
def thorough_cases() -> list[Case]:
    """Every three values of different settings meet."""
    return covering(SETTINGS, 3, candidates=20)


def case_name(case: Mapping[str, Any]) -> str:
    """Readable, unique."""
    return "-".join(
        str(value) if isinstance(value, str) else f"{name}{value}" for name, value in case.items()
    )


def plan_of(case: Mapping[str, Any]) -> Plan:
    """The plan; buckets are small, so that even these models have several."""
    return Plan(dp=case["dp"], microbatches=case["microbatches"], zero=case["zero"], bucket_bytes=600)


def job_of(case: Mapping[str, Any]) -> Job:
    """Three steps, the last of which has a short batch."""
    chunks = case["dp"] * case["microbatches"]
    batch = {"even": 2 * chunks, "uneven": 2 * chunks + max(1, chunks - 1), "empty": max(1, chunks // 2)}[
        case["shares"]
    ]
    num_samples = 2 * batch + max(1, batch // 2)
    return make_job(
        case["model"],
        case["optimizer"],
        batch_size=batch,
        data=partial(DATA.get(case["model"], vectors), num_samples),
    )


def run_cases(cases: Sequence[Mapping[str, Any]], devices: str) -> list[str] | None:
    """Verify each case in float64; a line for each that differs. None on ranks other than 0."""
    wrong: list[str] = []
    report = None
    for case in cases:
        report = verify(job_of(case), plan_of(case), devices=devices, steps=3, dtype=torch.float64)
        if report and not report.passed:
            wrong.append(f"{case_name(case)}: {report.worst(1)}")
    return wrong if report else None
