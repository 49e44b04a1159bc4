"""Unusual jobs that are right, verified at the defaults on CPU processes: none is said to differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.on_cpu_processes import cases, check_equal, divided_readily
from tests.test_unusual import JOBS, PRECISIONS, job_of

COVERING = {("loops: two optimizers", 2), ("states: queue of rows", 4)}
WHOLE = {"parts: limited rows"}  # each rank scales rows of its own copy before the update

pytestmark = [pytest.mark.long, pytest.mark.processes]


@pytest.mark.parametrize(("name", "ranks"), [*cases(JOBS, COVERING)])
def test_an_unusual_job_is_equal(
    name: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    divided_readily(monkeypatch, tmp_path)
    check_equal(job_of, name, ranks, PRECISIONS, whole=name in WHOLE)
