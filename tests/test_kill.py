"""kill -9 at any moment: an error that names the rank within ten seconds, nothing left, and a whole checkpoint to go on from."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.processes]
NUM_RANKS = 3
SECONDS_TO_TELL = 10.0


def command(out: Path, *more: str) -> list[str]:
    """Train the job on processes."""
    file = str(Path(__file__).with_name("kill_job.py"))
    return [sys.executable, "-m", "meshloom", "train", file, "--plan", f"dp={NUM_RANKS}", "--devices", "cpu", "--out", str(out), *more]


@contextmanager
def running(words: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A run that ends with the test."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate()


def ranks(launcher: psutil.Process) -> dict[int, psutil.Process]:
    """The rank processes that there are, by rank."""
    found: dict[int, psutil.Process] = {}
    for child in launcher.children(recursive=True):
        try:
            rank = child.environ().get("RANK")
            if rank is not None and os.getpgid(child.pid) == child.pid:
                found[int(rank)] = child
        except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
            continue
    return found


def kill_a_rank(process: subprocess.Popen[str], chooser: random.Random) -> tuple[int, float]:
    """Kill one of the ranks there are, waiting for the first to appear; which, and when."""
    launcher = psutil.Process(process.pid)
    while not (there := ranks(launcher)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)  # a moment to look again, not one to wait for something
    rank = chooser.choice(sorted(there))
    there[rank].kill()
    return rank, time.monotonic()


def told(process: subprocess.Popen[str]) -> tuple[str, float]:
    """What the run says until it ends, and when."""
    _, errors = process.communicate(timeout=60)
    return errors, time.monotonic()


def wait_for_checkpoint(process: subprocess.Popen[str], out: Path) -> None:
    """Until there is one."""
    while not list(out.glob("step-*")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def steps_after_resume(out: Path) -> tuple[int, int]:
    """Resume for five steps: (where it began, where it ended)."""
    newest = max(int(path.name.removeprefix("step-")) for path in out.glob("step-*"))
    done = subprocess.run(command(out, "--resume", str(out), "--steps", str(newest + 5), "--json", "-"), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    return events[0]["step"], [event["step"] for event in events if event["event"] == "step"][-1]


def assert_nothing_left(out: Path) -> None:
    """No process of this run."""
    left = [process for process in psutil.process_iter(["cmdline"]) if str(out) in (process.info["cmdline"] or [])]
    assert not left, left


def test_a_killed_rank_is_named_and_the_run_resumes(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with running(command(out)) as process:
        wait_for_checkpoint(process, out)
        rank, _ = kill_a_rank(process, random.Random(1))
        errors, _ = told(process)
    assert process.returncode == 1
    assert re.search(rf"[Rr]ank {rank} \(dp={rank}\) was killed by SIGKILL", errors), errors
    assert_nothing_left(out)
    began, ended = steps_after_resume(out)
    assert began > 0 and ended == began + 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thirty_kills_at_random_moments(tmp_path: Path) -> None:
    chooser = random.Random(0)
    resumed = 0
    for attempt in range(30):
        out = tmp_path / f"run-{attempt % 5}"  # later runs go on from what earlier ones left
        more = ["--resume", str(out)] if list(out.glob("step-*")) else []
        with running(command(out, *more)) as process:
            deadline = time.monotonic() + chooser.uniform(0.0, 12.0)  # start-up takes about half of it
            while time.monotonic() < deadline and process.poll() is None:
                time.sleep(0.01)
            rank, at = kill_a_rank(process, chooser)
            errors, ended = told(process)
        assert process.returncode == 1, errors
        assert ended - at < SECONDS_TO_TELL
        assert re.search(rf"[Rr]ank {rank} \(dp={rank}\) was killed by SIGKILL", errors), errors
        assert_nothing_left(out)
        if list(out.glob("step-*")) and attempt >= 25:
            began, last = steps_after_resume(out)
            assert last == began + 5
            resumed += 1
    assert resumed >= 3


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seconds", [0.5, 3.0, 6.0, 9.0])
def test_a_killed_launcher_leaves_nothing(seconds: float, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with running(command(out)) as process:
        time.sleep(seconds)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        gone = time.monotonic()
        while [each for each in psutil.process_iter(["cmdline"]) if str(out) in (each.info["cmdline"] or [])]:
            assert time.monotonic() - gone < SECONDS_TO_TELL
            time.sleep(0.05)


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_ending_a_run_leaves_a_whole_checkpoint_and_nothing_else(sign: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with running(command(out)) as process:
        wait_for_checkpoint(process, out)
        process.send_signal(sign)
        errors, _ = told(process)
    assert process.returncode == 128 + sign
    assert "Traceback" not in errors
    assert_nothing_left(out)
    began, ended = steps_after_resume(out)
    assert ended == began + 5
