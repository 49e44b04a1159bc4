"""Plans whose sums go around a ring of messages equal one device, simulated and on processes, over shared memory,
Gloo and several hosts."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from hosts_worlds import calls_of
from processes import on_ranks
from torch import Tensor

from meshloom.comm.collectives.ring import RingGroup
from meshloom.comm.shm.native_engine import why_not
from meshloom.core.errors import PeerLostError
from meshloom.core.mesh import Mesh
from meshloom.launch import transport
from meshloom.launch.opening import open_world
from meshloom.train.trainer import Trainer
from tests.jobs import make_job
from tests.verified import verified

CALLS = calls_of((0, 0), (1, 1), (5, 2), (300_001, 1))


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("dp", range(5, 9))
@pytest.mark.parametrize("model", ["gpt", "cnn"])
def test_a_ring_of_many_simulated_ranks(model: str, dp: int, zero: int):
    plan = f"dp={dp},exchange=ring,zero={zero},microbatches=2,bucket_bytes=600"
    assert verified(model, "adamw", plan) == "EQUAL"


@pytest.mark.covering("dp=3,exchange=ring,zero=1", "dp=5")
@pytest.mark.long
@pytest.mark.parametrize(
    "plan",
    [
        "dp=3,exchange=ring",
        "dp=3,exchange=ring,zero=1",
        "dp=5,exchange=ring,compress=bf16",
        "dp=2,tp=2,exchange=ring",
    ],
)
def test_bytes_are_as_predicted(plan: str):
    with Trainer(make_job("gpt", "adamw", steps=2), plan, devices="simulated") as trainer:
        for batch in trainer.batches():
            trainer.step(batch)
        summary = trainer.summary(0.0, {}, None)
        assert summary.predicted == summary.counted
        assert isinstance(trainer.replicas[0].replicas.group, RingGroup)


def _all_calls(through: str, hosts: str) -> list[Tensor]:
    if hosts:
        transport.host_identity = lambda: hosts[int(os.environ["RANK"])]  # type: ignore[assignment]  # this process ends with the test
    with open_world(Mesh(dp=int(os.environ["WORLD_SIZE"])), "cpu", 30, through, ring=True) as world:
        group = world.local[0].groups["dp"]
        assert isinstance(group.group, RingGroup)
        open_ = [call.start(group) for call in CALLS]  # all in flight at once
        for works, _ in reversed(open_):
            for work in works:
                work.wait()
        return [result for _, result in open_]


@pytest.mark.processes
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "it is there")
@pytest.mark.parametrize(
    ("through", "size", "hosts"),
    [("gloo", 3, ""), ("auto", 3, ""), ("auto", 4, "abab"), ("gloo", 5, "aabbb")],
)
@pytest.mark.slow
def test_operations_of_processes_equal_one_process(through: str, size: int, hosts: str):
    for rank, results in enumerate(on_ranks(_all_calls, size, through, hosts)):
        for call, result in zip(CALLS, results, strict=True):
            assert torch.equal(result, call.expected(rank, size)), (rank, call)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("plan", "size"),
    [
        ("dp=3,exchange=ring,bucket_bytes=600", 3),
        *(
            pytest.param(f"{plan},exchange=ring", size, marks=pytest.mark.slow)
            for plan, size in (
                ("dp=2", 2),
                ("dp=4,microbatches=2", 4),
                ("dp=2,pp=2,microbatches=2", 4),
                ("dp=2,tp=2", 4),
            )
        ),
        pytest.param("dp=3,exchange=ring,zero=1", 3, marks=pytest.mark.slow),
        pytest.param("dp=8,exchange=ring", 8, marks=pytest.mark.slow),
    ],
)
def test_processes_equal_one_device(plan: str, size: int):
    assert on_ranks(verified, size, "gpt", "adamw", plan, timeout_seconds=150.0)[0] == "EQUAL"


def _one_is_killed(through: str) -> str:
    world: Any = open_world(Mesh(dp=3), "cpu", 30, through, ring=True)
    group = world.local[0].groups["dp"]
    group.barrier().wait()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.all_reduce(torch.ones(100_000)).wait()
    except PeerLostError as error:
        return f"{error} {world.local[0].activity.now()}"
    finally:
        world.abort()
    return ""


@pytest.mark.processes
@pytest.mark.parametrize("through", ["auto", pytest.param("gloo", marks=pytest.mark.slow)])
def test_who_loses_a_rank_says_so(through: str):
    answers = on_ranks(_one_is_killed, 3, through, may_die=[1])
    for rank in (0, 2):
        assert (
            answers[rank].startswith(f"rank {rank} (dp={rank}) lost ")
            and "all_reduce of 391 KiB" in answers[rank]
        )
        assert "waiting for another rank" in answers[rank]
