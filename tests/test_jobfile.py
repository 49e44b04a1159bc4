"""A job is found in a user's file, or one sentence says what to give instead."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from meshloom.core.errors import JobError
from meshloom.core.job import Job
from meshloom.core.jobfile import as_program, load_job

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


def test_bytes_are_said(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_bytes(b"\x7fELF\x00")
    with pytest.raises(JobError, match="job.py is no Python source: .*null bytes"):
        load_job(str(tmp_path / "job.py"))


def test_a_file_of_another_kind_is_said(tmp_path: Path) -> None:
    (tmp_path / "job.txt").write_text("")
    with pytest.raises(JobError, match=r"job\.txt is not a Python file"):
        load_job(str(tmp_path / "job.txt"))


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """A working directory that holds pkg/jobs/train.py, whose `from ..sizes import BATCH` is what `python -m
    pkg.jobs.train` allows."""
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(Path.cwd()))])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pkg" / "jobs").mkdir(parents=True)
    (tmp_path / "pkg" / "sizes.py").write_text("BATCH = 5\n")
    (tmp_path / "pkg" / "jobs" / "train.py").write_text(
        JOB.replace("{name}", "job").replace("helper_beside", "..sizes")
    )
    return tmp_path


def batch_size_of(target: str) -> int:
    found = load_job(target)
    assert found is not None
    return found.batch_size


@pytest.mark.parametrize("initialised", [("pkg", "pkg/jobs"), ("pkg/jobs",), ("pkg",), ()])
@pytest.mark.parametrize("target", ["pkg/jobs/train.py", "pkg.jobs.train", "pkg.jobs.train:make"])
def test_relative_imports_work_as_under_python_m(
    packages: Path, initialised: tuple[str, ...], target: str
) -> None:
    """They ended in `attempted relative import with no known parent package`, with __init__.py or without."""
    for directory in initialised:
        (packages / directory / "__init__.py").write_text("")
    found = load_job(target)
    assert found is not None
    assert found.batch_size == 5
    assert found.loss.__module__ == "pkg.jobs.train"


def test_a_package_elsewhere_is_imported_too(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for directory in ("pkg", "pkg/jobs"):
        (packages / directory / "__init__.py").write_text("")
    (packages / "empty").mkdir()
    monkeypatch.chdir(packages / "empty")
    assert batch_size_of("../pkg/jobs/train.py") == 5


def test_the_working_directory_is_importable(packages: Path) -> None:
    """The console script has its own directory first on the path, so `import config` beside where one stands
    failed from there."""
    (packages / "config.py").write_text("BATCH = 7\n")
    (packages / "jobs").mkdir()
    (packages / "jobs" / "train.py").write_text(
        JOB.replace("{name}", "job").replace("helper_beside", "config")
    )
    assert batch_size_of("jobs/train.py") == 7


def test_a_directory_with_the_name_of_another_package_is_no_package(packages: Path) -> None:
    """A file in `torch/` is not torch's."""
    (packages / "torch").mkdir()
    (packages / "torch" / "job.py").write_text(
        JOB.replace("{name}", "job").replace("from helper_beside import BATCH", "BATCH = 3")
    )
    assert batch_size_of("torch/job.py") == 3


def test_words_are_the_files_own(packages: Path) -> None:
    """A file with argparse at import saw meshloom's words, and ended with a usage that was not asked for."""
    before = sys.argv
    text = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr', type=float)\nlr = parser.parse_args().lr\n"
    (packages / "job.py").write_text(
        text
        + JOB.replace("{name}", "job").replace("from helper_beside import BATCH", "BATCH = round(10 * lr)")
    )
    with as_program("job.py:job", ["--lr", "0.5"]):
        found = load_job("job.py:job")
        assert sys.argv == ["job.py", "--lr", "0.5"]
    assert sys.argv is before
    assert found is not None
    assert found.batch_size == 5


def test_a_loop_of_one_s_own_is_refused_before_it_runs(tmp_path: Path):
    file = tmp_path / "script.py"
    file.write_text("import meshloom as ml\nraise AssertionError('it ran')\n")
    with pytest.raises(
        JobError, match=r"script.py has no 'job'. Define job .* is started by meshloom run .*script.py"
    ):
        load_job(str(file))
