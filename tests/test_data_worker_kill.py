"""A killed data worker: one sentence wherever the main thread is, and nothing left of it or its siblings."""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from meshloom.launch.failure import report_failure
from tests.killing import assert_nothing_left, command, let_run, ranks, running, told


def test_what_torch_says_of_a_killed_data_worker_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """It is raised wherever the main thread is at that moment, also while another error is being explained;
    it ended in torch's traceback."""
    error = ValueError("something else")
    error.__cause__ = RuntimeError("DataLoader worker (pid 4711) is killed by signal: Killed. ")
    assert report_failure(error) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        "DataError: A process that reads data for this rank (process 4711, of Job(num_workers=...)) was killed by a signal: Killed (the system"
    )
    assert "Traceback" not in said and said.count("\n") <= 2


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(3))
def test_a_killed_data_worker_ends_the_run_with_one_sentence(
    attempt: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers left `pymp-*` directories, with the sockets over which they hand out batches, when they or
    their rank were killed."""
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:  # short: names of sockets must not be long
        monkeypatch.setenv("TMPDIR", scratch)
        out = tmp_path / "run"
        with running(command("data_worker_job.py", "dp=2", out)) as process:
            launcher = psutil.Process(process.pid)
            while len(there := _data_workers(launcher)) < 4:
                assert process.poll() is None, process.communicate()
                time.sleep(0.05)
            let_run(process, attempt * 0.7)
            there[attempt].kill()
            errors, _ = told(process)
        assert process.returncode == 1
        assert re.search(
            r"DataError on rank \d \(dp=\d\): The processes that read data failed: process \d+ was killed by SIGKILL \(the system",
            errors,
        ), errors
        assert "Traceback" not in errors, errors
        assert_nothing_left(out)
        assert not os.listdir(scratch)


def _data_workers(launcher: psutil.Process) -> list[psutil.Process]:
    try:
        return [child for rank in ranks(launcher).values() for child in rank.children()]
    except psutil.NoSuchProcess:
        return []
