"""Jobs as people write them, unannotated, each under each parallelism against one device."""

from __future__ import annotations

import pytest
import torch

from meshloom.core.plan import Plan
from meshloom.verify.run import verify
from tests.zoo import jobs

JOBS = jobs()
PLANS = ["dp=2", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2", "dp=2,pp=2,tp=2"]

pytestmark = [pytest.mark.usefixtures("silent_export", "dear_memory")]


def check(name: str, plan: str) -> None:
    report = verify(JOBS[name](), Plan.parse(plan), devices="simulated", steps=3, dtype=torch.float64)
    assert report is not None
    assert report.passed, f"{name} under {plan}: {report}"


def test_there_are_many_jobs() -> None:
    assert len(JOBS) >= 120
