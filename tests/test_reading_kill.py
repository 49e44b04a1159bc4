"""kill -9 while a job is read or its reading is kept: the run ends, nothing is left, and the next start
neither waits for nor believes what was begun."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.killing import (
    SECONDS_TO_TELL,
    assert_nothing_left,
    command,
    kill_the_launcher,
    left,
    ranks,
    running,
    told,
)

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]


def started(words: list[str]) -> str:
    done = subprocess.run(
        [*words, "--overwrite"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("moment", ["read", "write"])
@pytest.mark.parametrize("victim", [0, 1, None])
def test_a_run_that_is_killed_as_it_reads_leaves_nothing_and_the_next_one_reads(
    victim: int | None, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """victim: a rank; None: the launcher. Rank 0 reads and writes, while rank 1 waits for it."""
    out, kept, file = tmp_path / "run", tmp_path / "kept", tmp_path / "hold"
    words = command("reading_kill_job.py", "pp=2,microbatches=2", out, "--cache", str(kept), "--timings")
    monkeypatch.setenv("MESHLOOM_TESTS_HOLD", str(file))
    file.write_text(moment)
    with running(words) as process:
        while not file.with_suffix(".here").is_file():
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        if victim is None:
            kill_the_launcher(process, out)
        else:
            ranks(psutil.Process(process.pid))[victim].kill()
            began = time.monotonic()
            errors, ended = told(process)
            assert process.returncode == 1 and ended - began < SECONDS_TO_TELL
            assert re.search(rf"[Rr]ank {victim} \([a-z=0-9,]+\) was killed by SIGKILL", errors), errors
            assert "Traceback" not in errors, errors
    assert_nothing_left(out)
    there = [path.name for path in kept.iterdir()] if kept.exists() else []
    assert all(name.startswith(".new-") for name in there) and len(there) == (moment == "write")
    file.unlink()
    assert "The loss was captured anew: no earlier run has stored it." in started(words)
    if moment == "write":
        assert "The captured loss is taken from an earlier run." in started(words)
    assert not left(out)
