"""Real processes that take themselves for ranks on several hosts: the same results as in one process, and
errors that name who is gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hosts_worlds import calls_of
from launch_scripts import run, write_script
from processes import on_ranks
from torch import Tensor

from meshloom.comm.network.hosts import HostsGroup
from meshloom.comm.shm.native_engine import why_not
from meshloom.core.errors import PeerLostError
from meshloom.core.mesh import Mesh
from meshloom.core.plan import Plan
from meshloom.launch import transport
from meshloom.launch.opening import open_world
from meshloom.launch.world import World
from meshloom.verify.run import verify
from tests.jobs import make_job

pytestmark = [pytest.mark.processes, pytest.mark.skipif(bool(why_not()), reason=why_not())]

CALLS = calls_of((0, 0), (1, 3), (5, 2), (4099, 1))


def _live_on(hosts: Sequence[str]) -> None:
    """Let this process and its ranks' neighbours believe that they run there; in a process that ends with the
    test."""
    transport.host_identity = lambda: hosts[int(os.environ["RANK"])]  # type: ignore[assignment]


def _open(hosts: Sequence[str]) -> World:
    _live_on(hosts)
    world = open_world(Mesh(dp=len(hosts)), "cpu", timeout_seconds=30)
    assert isinstance(world.local[0].groups["dp"].group, HostsGroup)
    return world


def _all_calls(hosts: Sequence[str]) -> list[Tensor]:
    with _open(hosts) as world:
        group = world.local[0].groups["dp"]
        open_ = [call.start(group) for call in CALLS]  # all in flight at once
        for works, _ in reversed(open_):
            for work in works:
                work.wait()
        return [result for _, result in open_]


@pytest.mark.parametrize("hosts", ["aabb", "abab"])
def test_operations_of_processes_equal_one_process(hosts: str):
    for rank, results in enumerate(on_ranks(_all_calls, 4, hosts)):
        for call, result in zip(CALLS, results, strict=True):
            assert torch.equal(result, call.expected(rank, 4)), (rank, call)


def _job_is_equal(hosts: Sequence[str], plan: str) -> tuple[bool, str] | None:
    _live_on(hosts)
    report = verify(make_job("gpt", "adamw"), Plan.parse(plan), devices="cpu", steps=2, dtype=torch.float64)
    return report and (report.passed, report.devices)


@pytest.mark.parametrize(
    ("hosts", "plan"),
    [("aabb", "dp=4"), pytest.param("aaabbb", "dp=3,pp=2,microbatches=2", marks=pytest.mark.slow)],
)
def test_a_job_on_two_by_k_ranks_equals_one_device(hosts: str, plan: str):
    passed, devices = on_ranks(_job_is_equal, len(hosts), hosts, plan)[0]
    assert passed
    two = "through shared memory on each of 2 machines and over Gloo between them"
    assert devices.endswith(
        f"communicating {two}"
        if plan == "dp=4"
        else "communicating along dp through shared memory, along pp over Gloo"
    )


def _one_goes(hosts: Sequence[str], victim: int, killed: bool) -> tuple[str, str, float] | None:
    """What the others are told, of the error and of what they were doing, and after how long."""
    world = _open(hosts)
    context = world.local[0]
    context.world.barrier().wait()
    if context.rank == victim and killed:
        os.kill(os.getpid(), signal.SIGKILL)
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    if context.rank == victim:
        world.abort()
        # this process lives on: no connection closes
        store.wait([str(rank) for rank in range(len(hosts)) if rank != victim], timedelta(seconds=30))
        return None
    began = time.monotonic()
    try:
        context.groups["dp"].all_reduce(torch.ones(1000)).wait()
    except PeerLostError as error:
        return str(error), str(context.activity.now()), time.monotonic() - began
    finally:
        world.abort()  # as a run does that fails
        store.set(str(context.rank), "")
    return None


@pytest.mark.parametrize("killed", [True, False])
def test_who_loses_a_rank_says_which_one_where_it_shared_a_host(killed: bool):
    victim = 1
    answers = on_ranks(_one_goes, 4, "aabb", victim, killed, may_die=[victim])
    for rank in (0, 2, 3):
        text, doing, _ = answers[rank]
        assert text.startswith(f"rank {rank} (dp={rank}) ") and "all_reduce of 3.91 KiB" in text
        assert "waiting for another rank" in doing
    assert "lost rank 1 (dp=1)" in answers[0][0]


LEAVES_EARLY = """
    import os, sys
    import torch
    from meshloom.launch import transport
    from meshloom.launch.failure import leave, report_failure
    from meshloom.launch.opening import open_world
    from meshloom.core.mesh import Mesh

    transport.host_identity = lambda: "ab"[int(os.environ["RANK"]) // 2]
    world = open_world(Mesh(dp=4), timeout_seconds=250)
    group = world.local[0].groups["dp"]
    group.barrier().wait()
    if group.rank == 1:
        pending = [group.all_reduce(torch.ones(5)) for _ in range(2)]
        sys.exit(0)
    group.all_reduce(torch.ones(5)).wait()
    try:
        group.broadcast(torch.ones(5), 1).wait()
    except Exception as error:
        leave(report_failure(error))
"""


@pytest.mark.timeout(100)
def test_what_nobody_joins_does_not_keep_a_process_from_ending(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    assert run(write_script(tmp_path, LEAVES_EARLY), 4) == 1
    assert "rank" in capfd.readouterr().err
