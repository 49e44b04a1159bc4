"""A job is found in a user's file, or one sentence says what to give instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshloom.errors import JobError
from meshloom.job import Job
from meshloom.jobfile import load_job

JOB = """
import torch
import meshloom as ml
from helper_beside import BATCH

def make(steps=3):
    return ml.Job(model=lambda: torch.nn.Linear(2, 1), loss=lambda model, batch: model(batch).mean(),
                  optimizer=lambda named: torch.optim.SGD(named, lr=0.1), data=lambda: [torch.ones(2)], batch_size=BATCH, steps=steps)

def own_loop():
    pass

def needy(model):
    return make()

{name} = make()
number = 3
"""


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr("sys.path", list(__import__("sys").path))

    def write(name: str = "job", text: str = JOB) -> Path:
        (tmp_path / "helper_beside.py").write_text("BATCH = 4\n")
        path = tmp_path / "random.py"  # hides nothing
        path.write_text(text.replace("{name}", name))
        return path

    return write


def test_job_is_the_default_name(job_file) -> None:  # type: ignore[no-untyped-def]
    found = load_job(str(job_file()))
    assert isinstance(found, Job)
    assert found.batch_size == 4  # modules beside the file can be imported


def test_a_function_is_called(job_file) -> None:  # type: ignore[no-untyped-def]
    found = load_job(f"{job_file()}:make")
    assert isinstance(found, Job)


def test_a_function_that_returns_nothing_ran_its_own_loop(job_file) -> None:  # type: ignore[no-untyped-def]
    assert load_job(f"{job_file()}:own_loop") is None


@pytest.mark.parametrize(
    ("ending", "sentence"),
    [
        (":missing", "has no 'missing'. It has job: give"),
        (":needy", "needs arguments (model)"),
        (":number", "is a int, not a Job. It has job: give"),
    ],
)
def test_what_is_not_a_job_is_said(job_file, ending: str, sentence: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(JobError, match=re.escape(sentence)):
        load_job(f"{job_file()}{ending}")


def test_another_name_is_suggested(job_file) -> None:  # type: ignore[no-untyped-def]
    path = job_file(name="small")
    with pytest.raises(JobError, match=re.escape(f"{path} has no 'job'. It has small: give {path}:small.")):
        load_job(str(path))


def test_a_file_without_any_job_says_how_to_define_one(job_file) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(JobError, match=re.escape("Define job = meshloom.Job(...)")):
        load_job(str(job_file(text="x = 1")))


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"There is no file .*nothing\.py"):
        load_job(str(tmp_path / "nothing.py"))


def test_a_file_of_another_kind_is_said(tmp_path: Path) -> None:
    (tmp_path / "job.txt").write_text("")
    with pytest.raises(JobError, match=r"job\.txt is not a Python file"):
        load_job(str(tmp_path / "job.txt"))
