"""What companions measure, and that nothing is left of them."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor, nn

from meshloom.core.job import Job
from meshloom.measure import contention as companions
from meshloom.measure.contention import Companions, numbers_beside
from tests.jobs import class_loss, make_job

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


crowded = replace(make_job("mlp", "sgd", batch_size=8), loss=crowded_loss)


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


def test_a_batch_of_one_sample_measures_nothing():
    assert factors("crowded", replace(crowded, batch_size=1)) == ({}, [-signal.SIGKILL], "")


def test_only_ranks_with_cores_of_their_own_are_measured():
    assert numbers_beside(8, lambda ranks: max(1, 16 // ranks), 16) == [2, 4, 8]
    assert numbers_beside(4, lambda ranks: 1, 1) == []
    assert numbers_beside(1, lambda ranks: 1, 8) == []
