"""Jobs verified at the defaults on simulated devices, under the plans of `on_cpu_processes`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.verify.findings import Report
from meshloom.verify.run import verify
from tests.on_cpu_processes import PLANS
from tests.planted.judging import text_of


def cases(names: Iterable[str], covering: Collection[tuple[str, str]]) -> Iterator[Any]:
    """Each job with each plan, as parameters of a test; slow but for those of `covering`."""
    names = list(names)
    for plan in (plan for plans in PLANS.values() for plan in plans):
        for name in names:
            marks = [] if (name, plan) in covering else [pytest.mark.slow]
            yield pytest.param(name, plan, marks=marks, id=f"{name}-{plan}")


def verified(job: Job, plan: str, dtype: torch.dtype | None) -> Report:
    report = verify(job, Plan.parse(plan), devices="simulated", dtype=dtype, quick=False)
    assert report is not None
    return report


def check_equal(
    find: Callable[[str], Job], name: str, plan: str, dtypes: Sequence[torch.dtype | None]
) -> None:
    """Verifies the job that `find` has by this name in each precision."""
    for dtype in dtypes:
        report = verified(find(name), plan, dtype)
        assert report.passed and not report.causes, text_of(report)
