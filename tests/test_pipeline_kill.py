"""kill -9, SIGSTOP, or a loop without an end in the middle of a pipeline: named with rank, place and action,
nothing left, and the run goes on from its checkpoint."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from meshloom.core.errors import PeerLostError
from meshloom.core.plan import Plan
from meshloom.launch.processes.signals import ONE_REQUEST_SECONDS
from meshloom.train.trainer import Trainer
from tests.jobs import make_job
from tests.killing import (
    SECONDS_TO_TELL,
    assert_nothing_left,
    command,
    kill_the_launcher,
    newest,
    ranks,
    running,
    steps_after_resume,
    told,
    wait_for_checkpoint,
)
from tests.processes import on_ranks

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("silent_export")]
ACTION = r"(computing|waiting before|about to go on before) (?P<stage>\d)[FB]\d of step \d+ \(stage (?P=stage), (forward|backward) of microbatch \d\)"
QUICK = "pp=2,microbatches=4"
GRIDS = ("dp=2,pp=2,microbatches=4", "pp=2,tp=2,microbatches=4")


def words(plan: str, out: Path, *more: str) -> list[str]:
    return command("pipeline_kill_job.py", plan, out, *more)


@contextmanager
def troubled(words: list[str], file: Path) -> Iterator[subprocess.Popen[str]]:
    """A run whose job gets into the trouble that is written to `file`."""
    os.environ["MESHLOOM_TESTS_TROUBLE"] = str(file)
    try:
        with running(words) as process:
            yield process
    finally:
        del os.environ["MESHLOOM_TESTS_TROUBLE"]


def name_of(rank: int, plan: str) -> str:
    return rf"Rank {rank} \({Plan.parse(plan).mesh.place(rank)}\)"


def wait_for_a_later_checkpoint(process: subprocess.Popen[str], out: Path) -> None:
    """Until the run has got on."""
    before = newest(out)
    while newest(out) == before:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def begin_trouble(file: Path, text: str) -> None:
    """Let the run get into trouble at its next chance."""
    file.with_suffix(".new").write_text(text)
    file.with_suffix(".new").rename(file)  # nobody reads half of it


def wait_for_trouble(process: subprocess.Popen[str], file: Path, text: str) -> None:
    """Let the run get into trouble that lasts for some seconds; until it has begun."""
    begin_trouble(file, text)
    while file.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


@pytest.mark.slow
def test_a_rank_killed_in_an_action_is_named_with_it(tmp_path: Path):
    out, file = tmp_path / "run", tmp_path / "trouble"
    with troubled(words(QUICK, out), file) as process:
        wait_for_checkpoint(process, out)
        wait_for_trouble(process, file, "1 60")  # asleep, in the middle of the pipeline
        ranks(psutil.Process(process.pid))[1].kill()
        errors, _ = told(process)
    assert process.returncode == 1
    pattern = rf"{name_of(1, QUICK)} was killed by SIGKILL \(the system does that when memory runs out\) while computing 1F\d of step \d+ \(stage 1, "
    assert re.search(pattern, errors), errors
    assert_nothing_left(out)


def _lost_peer() -> str:
    """Rank 1 ends within an action of the second step; what rank 0 says of it."""
    job, seen = replace(make_job("mlp", "sgd"), batch_size=12), list[str]()

    with Trainer(job, "pp=2,microbatches=4", devices="cpu", timeout_seconds=60) as trainer:
        activity: Any = trainer.replicas[0].context.activity
        began = activity.began

        def leave(action: Any) -> None:
            began(action)
            seen.append(str(action))
            if len(seen) > 8 and str(action) == "1F1":
                os._exit(1)

        activity.began = leave
        try:
            for batch in trainer.batches():
                trainer.step(batch)
        except PeerLostError as error:
            trainer.world.abort()
            return str(error)
    return "nothing was lost"


def test_who_loses_a_peer_says_before_which_action_also_without_our_launcher():
    said, _ = on_ranks(_lost_peer, 2, may_die=[1])
    assert re.search(r"rank 0 \(dp=0\) lost rank 1 \(dp=0,pp=1\).* in .* It was " + ACTION, said), said
    assert "of step 1 " in said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_launcher_killed_while_a_rank_hangs_leaves_nothing(tmp_path: Path):
    out, file = tmp_path / "run", tmp_path / "trouble"
    with troubled(words(GRIDS[0], out), file) as process:
        wait_for_checkpoint(process, out)
        begin_trouble(file, "1 loop")
        time.sleep(1.0)
        kill_the_launcher(process, out)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("plan", GRIDS)
def test_hangs_within_ten_seconds(plan: str, tmp_path: Path):
    """A rank loops in the loss, and another is stopped."""
    chooser, out, mesh = random.Random(plan), tmp_path / "run", Plan.parse(plan).mesh
    for attempt, rank in enumerate((0, mesh.size - 1)):
        file = tmp_path / f"trouble-{attempt}"
        with troubled(words(plan, out, *(["--resume", str(out)] if attempt else [])), file) as process:
            wait_for_a_later_checkpoint(process, out)
            time.sleep(chooser.uniform(0.0, 0.5))
            if attempt % 2:
                ranks(psutil.Process(process.pid))[rank].send_signal(signal.SIGSTOP)
            else:
                begin_trouble(file, f"{rank} loop")
            at = time.monotonic()
            errors, ended = told(process)
        assert process.returncode == 1, errors
        what = (
            r"has been stopped \(SIGSTOP\) for \d+ s while"
            if attempt % 2
            else r"has been computing \dF\d of step \d+ .* the other ranks of its replica wait for it"
        )
        assert re.search(rf"{name_of(rank, plan)} {what}", errors), errors
        assert attempt % 2 or re.search(r'pipeline_kill_job.py", line \d+ in trouble', errors), (
            errors
        )  # its stack
        assert ended - at < SECONDS_TO_TELL, (rank, ended - at)
        assert_nothing_left(out)
    began, last = steps_after_resume(words(plan, out), out)
    assert began > 0 and last == began + 5


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", [1, 3])
def test_a_timeout_names_the_rank_that_all_wait_for(rank: int, tmp_path: Path):
    """The first message was taken, which may be of a rank that another one had told, or that waited for one
    which itself waited."""
    out, file, plan = tmp_path / "run", tmp_path / "trouble", GRIDS[0]
    with troubled(words(plan, out, "--hang-seconds", "0", "--timeout", "8"), file) as process:
        wait_for_checkpoint(process, out)
        begin_trouble(file, f"{rank} 60")
        errors, _ = told(process)
    assert process.returncode == 1
    assert "waited too long for" in errors and "has aborted" not in errors, errors
    assert re.search(rf"{name_of(rank, plan)} is still computing \dF\d of step", errors), errors
    assert_nothing_left(out)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_action_that_is_slow_once_passes(tmp_path: Path):
    """Five seconds where it usually takes milliseconds, on a machine that others use too."""
    out, file, plan = tmp_path / "run", tmp_path / "trouble", GRIDS[0]
    burners = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(2)]
    try:
        with troubled(words(plan, out), file) as process:
            wait_for_checkpoint(process, out)
            for rank in (0, 3):
                wait_for_trouble(process, file, f"{rank} 5")
                wait_for_a_later_checkpoint(process, out)
                wait_for_a_later_checkpoint(process, out)
            process.terminate()
            errors, _ = told(process)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "has been" not in errors


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_said_of_a_hang_when_that_is_turned_off(tmp_path: Path):
    out, file = tmp_path / "run", tmp_path / "trouble"
    with troubled(words(QUICK, out, "--hang-seconds", "0"), file) as process:
        wait_for_checkpoint(process, out)
        begin_trouble(file, "1 loop")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=12.0)
        process.terminate()  # its ranks are to finish their step first
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=ONE_REQUEST_SECONDS + 1.0)
        process.terminate()
        errors, _ = told(process)
    assert process.returncode == 128 + signal.SIGTERM and "has been" not in errors
