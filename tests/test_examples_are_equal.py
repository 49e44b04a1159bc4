"""Every example verified at the defaults, on simulated devices and on CPU processes, under plans of every kind and in two
precisions: none is said to differ."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from meshloom.core.job import Job
from meshloom.core.jobfile import as_program, load_job
from tests import on_cpu_processes, on_simulated_devices
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


@pytest.mark.parametrize(("name", "plan"), [*on_simulated_devices.cases(NAMES, {COVERING})])
def test_an_example_is_equal(name: str, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu_processes.divided_readily(monkeypatch, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # whose thread stays
    on_simulated_devices.check_equal(job_of, name, plan, PRECISIONS)


@pytest.mark.processes
@pytest.mark.parametrize(("name", "ranks"), [*on_cpu_processes.cases(NAMES, ())])
def test_an_example_is_equal_on_processes(
    name: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu_processes.divided_readily(monkeypatch, tmp_path)
    on_cpu_processes.check_equal(
        partial(job_of, directory=tmp_path), name, ranks, PRECISIONS, whole=name in WHOLE
    )
