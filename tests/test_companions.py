"""What companions measure, and that nothing is left of them."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.measure import contention as companions
from meshloom.measure.contention import Companions, advise_beside, numbers_beside
from meshloom.planner.pricing import Devices
from meshloom.report.advice import advice_records, print_advice
from tests.jobs import class_loss, make_job
from tests.rehearsals import machine

pytestmark = pytest.mark.processes
LOCK_SECONDS = 0.004


def crowded_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Computes twice as long while another process computes it, too. Files say which do so at all; whether they do now, the
    system says, however long they wait for a core."""
    mine = Path(os.environ["CROWDED"]) / str(os.getpid())
    mine.touch()
    others = [each for each in mine.parent.iterdir() if each != mine and _runs(int(each.name))]
    until = time.thread_time() + LOCK_SECONDS * (2 if others else 1)
    while time.thread_time() < until:
        pass
    return class_loss(model, batch)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_RUNNING
    except psutil.NoSuchProcess:
        return False


def loss_that_fails_elsewhere(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """In every process but the one whose number is in the environment."""
    assert os.environ["FAILS_ELSEWHERE"] == str(os.getpid())
    return class_loss(model, batch)


crowded = replace(make_job("mlp", "sgd", batch_size=8), loss=crowded_loss)
failing = replace(make_job("mlp", "sgd", batch_size=8), loss=loss_that_fails_elsewhere)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(companions, "cores", lambda: 2)


def factors(name: str, job: Job) -> tuple[dict[int, float], list[int], str]:
    """And the exit codes of the companions, and what was said of a failure."""
    threads = torch.get_num_threads()
    with Companions(f"{__file__}:{name}", 4, lambda ranks: 1) as beside:
        found = beside.factors(job)
    assert torch.get_num_threads() == threads
    return found, [each.returncode for each in beside.processes], beside.failure


@pytest.mark.slow
def test_ranks_that_slow_each_other_down_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CROWDED", str(tmp_path))
    found, ended, failure = factors("crowded", crowded)
    assert ended == [-signal.SIGKILL] and not failure
    assert list(found) == [2] and 1.4 < found[2] < 2.4


@pytest.mark.slow
def test_a_companion_that_fails_measures_nothing_and_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAILS_ELSEWHERE", str(os.getpid()))
    found, ended, failure = factors("failing", failing)
    assert not found and ended in ([1], [-signal.SIGKILL])
    assert "a process that computed it beside this one ended with AssertionError" in failure
    devices = Devices(num_ranks=2, machine=machine(), threads_of=lambda ranks: 1, common_memory=True)
    advice = advise_beside(failing, f"{__file__}:failing", devices, plans=[Plan.parse("dp=2")])
    assert advice.not_beside == failure
    assert {"event": "crowd", "failure": advice.not_beside} in advice_records(advice)
    text = io.StringIO()
    print_advice(advice, Console(file=text, width=200))
    assert advice.not_beside in text.getvalue()


def test_a_companion_that_is_killed_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAILS_ELSEWHERE", str(os.getpid()))
    with Companions(f"{__file__}:failing", 2, lambda ranks: 1) as beside:
        beside.processes[0].kill()
        beside.processes[0].wait()
        assert not beside.factors(failing)
    assert beside.failure.endswith("ended without a word.")


def test_a_batch_of_one_sample_measures_nothing():
    assert factors("crowded", replace(crowded, batch_size=1)) == ({}, [-signal.SIGKILL], "")


@pytest.mark.slow
def test_companions_end_when_who_started_them_is_killed(tmp_path: Path):
    program = f"""
from meshloom.measure import contention as companions
from tests.test_companions import crowded

companions.cores = lambda: 2
with companions.Companions({__file__ + ":crowded"!r}, 2, lambda ranks: 1) as beside:
    print(beside.processes[0].pid, flush=True)
    while True:
        beside.factors(crowded)
"""
    environment = {**os.environ, "CROWDED": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout
        companion = int(parent.stdout.readline())
        while not (tmp_path / str(companion)).exists():  # it computes
            assert parent.poll() is None
            time.sleep(0.02)
        parent.kill()
    deadline = time.monotonic() + 10
    while (
        Path(f"/proc/{companion}").exists()
        and "State:\tZ" not in Path(f"/proc/{companion}/status").read_text()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_only_ranks_with_cores_of_their_own_are_measured():
    assert numbers_beside(8, lambda ranks: max(1, 16 // ranks), 16) == [2, 4, 8]
    assert numbers_beside(4, lambda ranks: 1, 1) == []
    assert numbers_beside(1, lambda ranks: 1, 8) == []
