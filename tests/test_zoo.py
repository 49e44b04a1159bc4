"""Jobs as people write them, unannotated, each under each parallelism against one device: none is refused, differs or
fails otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from meshloom.core.plan import Plan
from meshloom.verify.run import verify
from tests import zoo, zoo_further, zoo_outside
from tests.zoo import jobs_of

ZOOS = {zoo: 190, zoo_outside: 95, zoo_further: 100}  # package -> how many jobs it holds at least
JOBS = {name: job for package in ZOOS for name, job in jobs_of(package).items()}
PLANS = ("dp=2", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2", "dp=2,pp=2,tp=2")
# what the covering subset runs
COVERING = {
    "series: informer": "dp=2",
    "adversaries: style gan": "dp=2",
    "language: crf tagger": "dp=2,zero=3",
    "lengths: nested in the batch": "tp=2",
    "habits: functions with plain arguments": "tp=2",
    "sequences: self critical captions": "pp=2,microbatches=2",
    "scans: recurrence in logarithms": "pp=2,microbatches=2",
    "functions: sparsemax attention": "dp=2,pp=2,tp=2",
    "habits: fast paths that fail": "dp=2,pp=2,tp=2",
}

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export", "dear_memory")]


def _cases() -> Iterator[Any]:
    for plan in PLANS:
        for name in JOBS:
            marks = [] if COVERING.get(name) == plan else [pytest.mark.slow]
            yield pytest.param(name, plan, marks=marks, id=f"{name}-{plan}")


@pytest.mark.parametrize(("name", "plan"), [*_cases()])
def test_a_job_equals_one_device(name: str, plan: str) -> None:
    report = verify(JOBS[name](), Plan.parse(plan), devices="simulated", steps=3, dtype=torch.float64)
    assert report is not None
    assert report.passed, str(report)


def test_there_are_many_jobs_and_each_that_is_named_is_there() -> None:
    sizes = {package: len(jobs_of(package)) for package in ZOOS}
    assert all(sizes[package] >= least for package, least in ZOOS.items())
    assert len(JOBS) == sum(sizes.values())
    assert set(COVERING) <= set(JOBS)
