"""Runs of the command line that are killed, for the tests of that."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from meshloom.checkpoint.format import checkpoint_directories, named_step

SECONDS_TO_TELL = 10.0


def command(job: str, plan: str, out: Path, *more: str) -> list[str]:
    """Train the job of a file of the tests on processes."""
    file = str(Path(__file__).with_name(job))
    return [
        sys.executable,
        "-m",
        "meshloom",
        "train",
        file,
        "--plan",
        plan,
        "--devices",
        "cpu",
        "--out",
        str(out),
        *more,
    ]


@contextmanager
def running(words: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A run that ends with the test."""
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
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


def let_run(process: subprocess.Popen[str], seconds: float) -> None:
    """For so long, or until it ends."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.001)


def told(process: subprocess.Popen[str]) -> tuple[str, float]:
    """What the run says until it ends, and when."""
    _, errors = process.communicate(timeout=60)
    return errors, time.monotonic()


def wait_for_checkpoint(process: subprocess.Popen[str], out: Path) -> None:
    """Until there is one."""
    while not list(out.glob("step-*")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def newest(out: Path) -> int:
    """The step of the newest checkpoint; 0: there is none. One killed before its renaming is one too."""
    return max(
        (int(named_step(path).removeprefix("step-")) for path in checkpoint_directories(out)), default=0
    )


def steps_after_resume(words: list[str], out: Path) -> tuple[int, int]:
    """Resume the run of `words` for five steps: (where it began, where it ended)."""
    done = subprocess.run(
        [*words, "--resume", str(out), "--steps", str(newest(out) + 5), "--json", "-"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    start = next(event for event in events if event["event"] == "start")
    return start["step"], [event["step"] for event in events if event["event"] == "step"][-1]


def left(out: Path) -> list[psutil.Process]:
    """The processes of this run that there are."""
    return [
        process for process in psutil.process_iter(["cmdline"]) if str(out) in (process.info["cmdline"] or [])
    ]


def assert_nothing_left(out: Path) -> None:
    """No process of this run."""
    assert not left(out), left(out)


def kill_the_launcher(process: subprocess.Popen[str], out: Path) -> None:
    """And see that its ranks end in time."""
    process.kill()
    process.communicate()
    gone = time.monotonic()
    while left(out):
        assert time.monotonic() - gone < SECONDS_TO_TELL
        time.sleep(0.05)
