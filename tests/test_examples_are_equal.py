"""Every example verified at the defaults, on simulated devices and on CPU processes, under plans of every kind and in two
precisions: none is said to differ."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from meshloom.core.job import Job
from meshloom.core.jobfile import as_program, load_job
from meshloom.core.plan import Plan
from meshloom.verify.run import verify
from tests.on_cpu_processes import PLANS, cases, check_equal, divided_readily
from tests.planted.judging import text_of
from tests.test_examples import EXAMPLES
from tests.test_unusual import PRECISIONS

NAMES = [path.stem for path in EXAMPLES]
COVERING = ("02_digits", "tp=2")
WHOLE = {"17_recommendation"}  # gradients of tables are sparse, and every replica updates their rows

pytestmark = pytest.mark.long


def job_of(name: str, directory: Path | None = None) -> Job:
    """directory: where the process works from now on, as examples write what they begin from."""
    if directory:
        os.chdir(directory)
    (path,) = (path for path in EXAMPLES if path.stem == name)
    with as_program(str(path), []):
        job = load_job(str(path))
    assert job is not None
    return job


def _on_simulated_devices() -> Iterator[Any]:
    for plan in (plan for plans in PLANS.values() for plan in plans):
        for name in NAMES:
            marks = [] if (name, plan) == COVERING else [pytest.mark.slow]
            yield pytest.param(name, plan, marks=marks, id=f"{name}-{plan}")


@pytest.mark.parametrize(("name", "plan"), [*_on_simulated_devices()])
def test_an_example_is_equal(name: str, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    divided_readily(monkeypatch, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # whose thread stays
    for dtype in PRECISIONS:
        report = verify(job_of(name), Plan.parse(plan), devices="simulated", dtype=dtype, quick=False)
        assert report is not None
        assert report.passed and not report.causes, text_of(report)


@pytest.mark.processes
@pytest.mark.parametrize(("name", "ranks"), [*cases(NAMES, ())])
def test_an_example_is_equal_on_processes(
    name: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    divided_readily(monkeypatch, tmp_path)
    check_equal(partial(job_of, directory=tmp_path), name, ranks, PRECISIONS, whole=name in WHOLE)
