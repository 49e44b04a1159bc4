"""kill -9 at any moment: an error that names the rank within ten seconds, nothing left, and a whole
checkpoint to go on from."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

import pytest

from tests.killing import (
    SECONDS_TO_TELL,
    assert_nothing_left,
    kill_a_rank,
    kill_the_launcher,
    let_run,
    newest,
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
        rank, _ = kill_a_rank(process, random.Random(1))
        errors, _ = told(process)
    assert process.returncode == 1
    assert re.search(rf"[Rr]ank {rank} \(dp={rank}\) was killed by SIGKILL", errors), errors
    assert_nothing_left(out)
    began, ended = steps_after_resume(command(out), out)
    assert began > 0 and ended == began + 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thirty_kills_at_random_moments(tmp_path: Path) -> None:
    chooser = random.Random(0)
    for attempt in range(30):
        out = tmp_path / f"run-{attempt % 5}"  # later runs go on from what earlier ones left
        more = ["--resume", str(out)] if newest(out) else []
        with running(command(out, *more)) as process:
            if attempt >= 25:  # however slowly a run starts, the last ones leave something to go on from
                wait_for_checkpoint(process, out)
            let_run(process, chooser.uniform(0.0, 12.0))  # start-up takes about half of it
            rank, at = kill_a_rank(process, chooser)
            errors, ended = told(process)
        assert process.returncode == 1, errors
        assert ended - at < SECONDS_TO_TELL
        assert re.search(rf"[Rr]ank {rank} \(dp={rank}\) was killed by SIGKILL", errors), errors
        assert_nothing_left(out)
        if attempt >= 25:
            began, last = steps_after_resume(command(out), out)
            assert last == began + 5


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seconds", [0.5, 3.0, 6.0, 9.0])
def test_a_killed_launcher_leaves_nothing(seconds: float, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with running(command(out)) as process:
        time.sleep(seconds)
        kill_the_launcher(process, out)


@pytest.mark.slow  # tests/test_stopping.py stops simulated ranks, tests/test_launch_signals.py processes
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_ending_a_run_leaves_a_whole_checkpoint_and_nothing_else(
    sign: signal.Signals, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with running(command(out)) as process:
        wait_for_checkpoint(process, out)
        process.send_signal(sign)
        errors, _ = told(process)
    assert process.returncode == 128 + sign
    assert "Traceback" not in errors
    *_, last = errors.splitlines()
    assert (
        last
        == f"Stopped by {sign.name} after step {newest(out)} of 1000000, which is saved. Go on with --resume {out}."
    )
    assert_nothing_left(out)
    began, ended = steps_after_resume(command(out), out)
    assert ended == began + 5
