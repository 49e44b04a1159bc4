"""Processes join a world, part from it, and say who is missing."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks

from meshloom.comm.objects import collect
from meshloom.comm.shm.native_engine import why_not
from meshloom.core.errors import DeviceError, PeerLostError
from meshloom.core.mesh import Mesh
from meshloom.launch.opening import open_world

pytestmark = pytest.mark.processes


def _two_worlds() -> object:
    results: list[object] = []
    for sizes in ({"dp": 4}, {"dp": 2, "tp": 2}):
        with open_world(Mesh(**sizes), "cpu", timeout_seconds=30) as world:
            (here,) = world.local
            mine = [
                collect(group, here.rank) for group in (*here.groups.values(), here.statistics, here.world)
            ]
            results.append(
                (here.rank, str(here.place), list(here.groups), mine, world.kind, world.main, world.why)
            )
        results.append(dist.is_initialized())
    return results


def test_processes_form_the_groups_of_the_mesh_and_can_do_so_again():
    cores = len(os.sched_getaffinity(0))
    transport = (
        f"communicating over Gloo: {why_not()}" if why_not() else "communicating through shared memory"
    )
    why = f"cpu: 4 ranks as processes on {cores} cores, 1 thread each (asked for), {transport}"
    for rank, results in enumerate(on_ranks(_two_worlds, 4)):
        along = {axis: list(Mesh(dp=2, tp=2).group_of(axis, rank)) for axis in ("dp", "tp")}
        everyone = [0, 1, 2, 3]
        assert results == [
            (rank, f"dp={rank}", ["dp"], [everyone] * 3, "cpu", rank == 0, why),
            False,
            (
                rank,
                str(Mesh(dp=2, tp=2).place(rank)),
                ["dp", "tp"],
                [along["dp"], along["tp"], along["dp"], everyone],
                "cpu",
                rank == 0,
                why,
            ),
            False,
        ]


def _in_an_initialized_process() -> object:
    dist.init_process_group("gloo")
    with open_world(Mesh(dp=2), timeout_seconds=30) as world:
        seen = collect(world.local[0].world, world.local[0].rank)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return seen, tensor.item()


def test_a_process_group_of_the_users_own_is_used_and_left_alone():
    assert on_ranks(_in_an_initialized_process, 2) == [([0, 1], 2.0)] * 2


def _one_is_done_early() -> object:
    world = open_world(Mesh(dp=2), timeout_seconds=30)
    try:
        if world.local[0].rank == 0:
            collect(world.local[0].world, "still here")
    except PeerLostError as error:
        return str(error)
    finally:
        world.close()
    return None


def test_a_rank_that_is_done_early_does_not_keep_the_others_waiting():
    waiting, done = on_ranks(_one_is_done_early, 2)
    assert done is None
    assert waiting.startswith("rank 0 (dp=0) lost rank 1 (dp=1)")


def _simulated_in_a_rank() -> str:
    with pytest.raises(DeviceError) as error:
        open_world(Mesh(dp=2), "simulated")
    return str(error.value)


def test_simulating_in_each_of_several_processes_is_refused():
    text = "devices=simulated keeps all ranks in one process, but 2 processes were started. Start one, or use devices=cpu."
    assert on_ranks(_simulated_in_a_rank, 2) == [text] * 2
