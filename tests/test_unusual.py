"""Unusual jobs that are right, verified at the defaults on simulated devices, under plans of every kind and in two precisions: none is
said to differ."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshloom.core.job import Job
from meshloom.verify.findings import lines_of
from tests import zoo_unusual
from tests.on_cpu_processes import divided_readily
from tests.on_simulated_devices import cases, check_equal, verified
from tests.planted.judging import text_of
from tests.zoo import jobs_of

JOBS = jobs_of(zoo_unusual)
LEAST = 75
COVERING = {
    "numbers: layer scale of a millionth": "tp=2",
    "numbers: mask of minus infinity": "dp=2,tp=2",
    "numbers: samples that are all alike": "tp=2",
    "parts: bfloat16 inside": "dp=2",
    "parts: trunk that thaws": "dp=2,zero=2",
    "states: codebook": "pp=2,microbatches=2",
    "loops: warm up from zero": "dp=2,pp=2",
}
PRECISIONS: tuple[torch.dtype | None, ...] = (None, torch.float64)  # the job's own, and float64

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


def job_of(name: str) -> Job:
    return JOBS[name]()


@pytest.mark.parametrize(("name", "plan"), [*cases(JOBS, COVERING.items())])
def test_an_unusual_job_is_equal(
    name: str, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    divided_readily(monkeypatch, tmp_path)
    check_equal(job_of, name, plan, PRECISIONS)


def test_there_are_many_and_each_that_is_named_is_there() -> None:
    assert len(JOBS) >= LEAST and set(COVERING) <= set(JOBS)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_a_buffer_that_is_not_saved_is_named_and_nothing_is_resumed(plan: str) -> None:
    """What a `state_dict` leaves out and training changes was lost, and verification said of it that a layer computes something else."""
    report = verified(job_of("states: average that is not saved"), plan, None)
    assert report.passed and not report.causes, text_of(report)
    text = " ".join(lines_of(report))
    assert (
        "nothing was resumed: a checkpoint does not hold what forwards keep in inside.0.average, a buffer that is not persistent"
        in text
    )


def test_a_parameter_without_elements_has_no_state_to_save() -> None:
    report = verified(job_of("numbers: parameters without dims and elements"), "dp=2", None)
    assert report.passed and all(each.passed for each in report.between), text_of(report)


def test_what_no_checkpoint_can_hold_is_named_and_nothing_is_saved() -> None:
    report = verified(job_of("numbers: complex parameters"), "dp=2", torch.float64)
    assert report.passed
    assert "nothing was saved and resumed: inside.0.filters is torch.complex128" in " ".join(lines_of(report))
