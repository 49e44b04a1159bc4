"""Asynchronous training whose workers are several processes: one worker to everybody else, whatever becomes
of its ranks."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
import torch
from elastic_runs import ElasticRun, left
from safetensors.torch import load_file

from meshloom.telemetry.progress import QUIET
from meshloom.train.trainer import Trainer
from tests import elastic_job

pytestmark = pytest.mark.processes


def ranks_of(worker: psutil.Process, count: int, run: ElasticRun) -> list[psutil.Process]:
    """The processes that a worker has started as its ranks, in their order, once all are there."""
    found: dict[int, psutil.Process] = {}

    def all_there() -> bool:
        for child in worker.children():
            rank = json.loads(child.environ().get("MESHLOOM_ROLE", "{}")).get("rank")
            if rank is not None:
                found[rank] = child
        return len(found) == count

    run.until(all_there)
    return [found[rank] for rank in range(count)]


@pytest.mark.parametrize(
    "inner",
    [
        "tp=2",
        pytest.param("pp=2,microbatches=2", marks=pytest.mark.slow),
        pytest.param("recompute=full", marks=pytest.mark.slow),
    ],
)
def test_one_divided_worker_is_one_device(inner: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with ElasticRun(
        "steady", f"dp=1,exchange=async,{inner}", tmp_path, "--out", str(out), "--steps", "12"
    ) as run:
        assert run.ended() == 0, run.text()
    with Trainer(elastic_job.steady, ",".join(each for each in inner.split(",") if "m" in each and "re" not in each) or "dp=1", devices="simulated",
                 listener=QUIET, steps=12) as trainer:  # fmt: skip
        trainer.fit()
        expected = dict(trainer.replicas[0].model.state_dict())
    found = load_file(out / "step-00000012" / "model.safetensors")
    for name, value in expected.items():
        # float32: products are divided, and AdamW divides by small numbers
        torch.testing.assert_close(found[name], value, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
def test_a_worker_that_loses_a_rank_is_lost_and_the_run_goes_on(tmp_path: Path) -> None:
    """Two workers of two ranks. One loses a rank by SIGKILL; the other is asked to go, but not before a
    third, of two ranks too, has joined."""
    with ElasticRun("steady", "dp=2,tp=2,exchange=async", tmp_path, "--steps", "1500") as run:
        directory = run.directory()
        workers = [run.of("worker", number) for number in range(2)]
        first, second = (ranks_of(worker, 2, run) for worker in workers)
        run.until_updates(8)
        first[1].kill()
        run.until(lambda: "; the run goes on" in run.text())
        joined = run.join()
        run.until(lambda: "has joined" in run.text())
        workers[1].terminate()
        run.until(lambda: "has left" in run.text())
        assert run.ended() == 0, run.text()
        joined.join(60)
        assert joined.exitcode == 0
        assert not left(str(directory))
        assert not any(process.is_running() for process in (*first, *second))
    assert "was killed by SIGKILL, so the worker ends" in run.text()
    [asynchronous] = run.records("asynchronous")
    assert sum(asynchronous["ages"].values()) == 1500
