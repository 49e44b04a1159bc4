"""Unusual jobs that are right, verified at the defaults on CPU processes: none is said to differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshloom.core.job import Job
from tests.machine import with_fast_links
from tests.on_cpu_processes import PLANS, SECONDS, outcomes
from tests.test_unusual import JOBS, precisions

COVERING = {("loops: two optimizers", 2), ("states: queue of rows", 4)}

pytestmark = [pytest.mark.long, pytest.mark.processes]


def job_of(name: str) -> Job:
    return JOBS[name]()


def _cases() -> Iterator[Any]:
    for name in JOBS:
        for ranks, plans in PLANS.items():
            marks = [pytest.mark.timeout(2 * SECONDS * len(plans))]
            marks += [] if (name, ranks) in COVERING else [pytest.mark.slow]
            yield pytest.param(name, ranks, marks=marks, id=f"{name}-{ranks}")


@pytest.mark.parametrize(("name", "ranks"), [*_cases()])
def test_an_unusual_job_is_equal(
    name: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fast_links(monkeypatch, tmp_path)  # so that all that can be is divided
    monkeypatch.setenv("MESHLOOM_CACHE", str(tmp_path / "cache"))
    found = outcomes(job_of, name, ranks, precisions(name))
    assert len(found) == len(PLANS[ranks]) * len(precisions(name))
    assert not [each.said for each in found if each.said]
