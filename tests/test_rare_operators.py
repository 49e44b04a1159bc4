"""Operators that few models have (`tests/rare_operators.py`), divided and cut, against one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from meshloom.core.plan import Plan
from meshloom.verify.run import verify
from tests.rare_operators import OPERATORS, job

COVERING = {
    "view dtype": "tp=2",
    "relaxed bernoulli": "dp=2,pp=2,tp=2",
    "fold unfold": "tp=2",
    "lu solve": "tp=2",
    "lstsq": "dp=2,pp=2,tp=2",
    "torch.cond": "tp=2",
}

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export", "dear_memory")]


def _cases() -> Iterator[Any]:
    for name in OPERATORS:
        for plan in ("tp=2", "dp=2,pp=2,tp=2"):
            marks = [] if COVERING.get(name) == plan else [pytest.mark.slow]
            yield pytest.param(name, plan, marks=marks, id=f"{name}-{plan}")


@pytest.mark.covering("lu solve", "view dtype", "torch.cond")
@pytest.mark.parametrize(("name", "plan"), [*_cases()])
def test_an_operator_equals_one_device(name: str, plan: str):
    report = verify(job(name), Plan.parse(plan), devices="simulated", dtype=torch.float64)
    assert report is not None and report.passed, str(report)
