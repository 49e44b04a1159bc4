"""What verification says of a plan, for the tests of plans."""

from __future__ import annotations

from typing import Any

import torch

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.verify.findings import Report
from meshloom.verify.run import verify
from tests.jobs import make_job
from tests.reports import text_of


def verified(model: str, optimizer: str, plan: str) -> str | None:
    """EQUAL, or the report, on rank processes where there are some, else simulated; None on ranks that do not report."""
    report = verify(
        make_job(model, optimizer), Plan.parse(plan), devices="auto", steps=2, dtype=torch.float64
    )
    if report is None:
        return None
    return "EQUAL" if report.passed else text_of(report)


def report_on(
    job: Job, plan: str | Plan, *, steps: int = 2, dtype: torch.dtype | None = torch.float64, **settings: Any
) -> Report:
    """Of simulated ranks. settings: further ones of `verify`."""
    plan = plan if isinstance(plan, Plan) else Plan.parse(plan)
    report = verify(job, plan, devices="simulated", steps=steps, dtype=dtype, **settings)
    assert report is not None
    return report


def equals_one_device(job: Job, plan: str | Plan, **settings: Any) -> Report:
    """The report on simulated ranks, which says EQUAL. settings: as of `report_on`."""
    report = report_on(job, plan, **settings)
    assert report.passed, text_of(report)
    return report
