"""Jobs as people write them, unannotated, each under each parallelism against one device: none is refused, differs or
fails otherwise."""

from __future__ import annotations

import pytest
import torch

from meshloom.core.plan import Plan
from meshloom.verify.run import verify
from tests import zoo, zoo_further, zoo_outside
from tests.zoo import jobs_of

ZOOS = {zoo: 190, zoo_outside: 95, zoo_further: 100}  # package -> how many jobs it holds at least
JOBS = {name: job for package in ZOOS for name, job in jobs_of(package).items()}
PLANS = ("dp=2", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2", "dp=2,pp=2,tp=2")
pytestmark = [pytest.mark.zoo, pytest.mark.usefixtures("silent_export", "dear_memory")]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", JOBS)
def test_a_job_equals_one_device(name: str, plan: str) -> None:
    report = verify(JOBS[name](), Plan.parse(plan), devices="simulated", steps=3, dtype=torch.float64)
    assert report is not None
    assert report.passed, str(report)


def test_there_are_many_jobs_and_each_that_is_named_is_there() -> None:
    sizes = {package: len(jobs_of(package)) for package in ZOOS}
    assert all(sizes[package] >= least for package, least in ZOOS.items())
    assert len(JOBS) == sum(sizes.values())
