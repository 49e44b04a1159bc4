"""What verification says of a plan, on rank processes where there are some, else simulated, for the tests of
plans."""

from __future__ import annotations

import io

import torch
from rich.console import Console

from meshloom.core.plan import Plan
from meshloom.verify.findings import print_report
from meshloom.verify.run import verify
from tests.jobs import make_job


def verified(model: str, optimizer: str, plan: str) -> str | None:
    """EQUAL, or the report; None on ranks that do not report."""
    report = verify(
        make_job(model, optimizer), Plan.parse(plan), devices="auto", steps=2, dtype=torch.float64
    )
    if report is None:
        return None
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=160))
    return "EQUAL" if report.passed else stream.getvalue()
