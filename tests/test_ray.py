"""A loop of one's own in a process group that others have made, as Ray Train does on its workers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import meshloom as ml
from meshloom.core.random import preserved_draws
from meshloom.loops.ranks import leave_ranks
from tests.processes import on_ranks

FILE = Path(__file__).parents[1] / "docs/clusters/ray_train.py"


def train(path: str) -> list[float]:
    """What a worker is given to run."""
    torch.manual_seed(7)
    x = torch.randn(21, 5, dtype=torch.float64)
    model = ml.parallel(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double())
    data = TensorDataset(x, (x.sum(1) > 0).long())
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.1), list[float]()
    for inputs, labels in ml.loader(DataLoader(data, batch_size=4, shuffle=True)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(ml.mean(loss.detach())))
    ml.save(model.state_dict(), path)
    return losses


def worker(folder: str, transport: str) -> tuple[list[float], float, bool]:
    """meshloom was imported before the variables of ranks were there; the loop's thread is not the main one."""
    os.environ["MESHLOOM_TRANSPORT"] = transport
    dist.init_process_group("gloo")
    own = Path(folder) / str(dist.get_rank())
    own.mkdir()
    numpy.random.seed(dist.get_rank())  # as unseeded ones
    found: list[list[float]] = []
    thread = threading.Thread(target=lambda: found.append(train(str(own / "last.pt"))))
    thread.start()
    thread.join()
    dist.destroy_process_group()  # before the process ends
    leave_ranks(well=True)
    return found[0], float(numpy.random.rand()), (own / "last.pt").exists()


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["auto", pytest.param("gloo", marks=pytest.mark.slow)])
def test_ranks_are_those_of_a_group_that_is_there(transport: str, tmp_path: Path):
    with preserved_draws():
        expected = train(str(tmp_path / "alone.pt"))
    first, second = on_ranks(worker, 2, str(tmp_path), transport, timeout_seconds=120.0)
    assert first[0] == second[0] == pytest.approx(expected, rel=1e-12)
    assert first[1] == second[1]  # rank 0's draws
    assert (first[2], second[2]) == (True, False)  # the main process's folder has the file
    ours, theirs = (torch.load(tmp_path / name) for name in ("0/last.pt", "alone.pt"))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is in no installation for development")
@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_a_trainer_of_ray_trains(plan: str, tmp_path: Path):
    command = [sys.executable, str(FILE), plan, str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and "'epoch': 2" in done.stdout, done.stdout + done.stderr
