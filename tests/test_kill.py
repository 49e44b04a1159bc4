"""kill -9 at any moment: an error that names the rank within ten seconds, nothing left, and a whole
checkpoint to go on from."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from tests.killing import (
    SECONDS_TO_TELL,
    assert_nothing_left,
    kill_a_rank,
    running,
    steps_after_resume,
    told,
    wait_for_checkpoint,
)
from tests.killing import command as command_of

pytestmark = [pytest.mark.processes]
NUM_RANKS = 3


def command(out: Path, *more: str) -> list[str]:
    return command_of("kill_job.py", f"dp={NUM_RANKS}", out, *more)


def test_a_killed_rank_is_named_and_the_run_resumes(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with running(command(out)) as process:
        wait_for_checkpoint(process, out)
        rank, at = kill_a_rank(process, random.Random(1))
        errors, ended = told(process)
    assert process.returncode == 1
    assert ended - at < SECONDS_TO_TELL
    assert re.search(rf"[Rr]ank {rank} \(dp={rank}\) was killed by SIGKILL", errors), errors
    assert_nothing_left(out)
    began, ended = steps_after_resume(command(out), out)
    assert began > 0 and ended == began + 5
