"""A world is opened within this process, or not at all where the plan and the processes do not fit."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from machine import machine

from meshloom.comm.objects import collect
from meshloom.comm.turns import in_turns
from meshloom.core.errors import DeviceError, PlanError
from meshloom.core.mesh import Mesh, MeshCoordinates
from meshloom.launch.environment import is_rank
from meshloom.launch.opening import open_world

CPU = torch.device("cpu")


def test_half_an_environment_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        DeviceError, match="RANK and WORLD_SIZE are set, but MASTER_ADDR is not. Start with torchrun"
    ):
        open_world(Mesh(dp=2))
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(DeviceError, match="WORLD_SIZE='two' .* must be a whole number"):
        open_world(Mesh(dp=2))


@pytest.mark.parametrize(("started", "planned"), [(2, 4), (4, 2), (1, 2)])
def test_a_mesh_of_another_size_than_the_processes_is_an_error_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch, started: int, planned: int
):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": str(started),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert is_rank()
    with pytest.raises(PlanError) as error:
        open_world(Mesh(dp=planned))
    assert f"The plan needs {planned} ranks (dp={planned}), but {started} process" in str(error.value)
    assert (
        f"Start {planned} (torchrun --nproc-per-node {planned} on one machine), or use a plan of {started}, like dp={started}."
        in str(error.value)
    )


def test_a_world_of_one_needs_no_process_group():
    with open_world(Mesh()) as world:
        assert (world.kind, world.main, len(world.local)) == (
            "cuda" if torch.cuda.is_available() else "cpu",
            True,
            1,
        )
        tensor = torch.ones(3)
        world.local[0].groups["dp"].all_reduce(tensor).wait()
        assert torch.equal(tensor, torch.ones(3))
        assert not dist.is_initialized()
        assert world.memory_bytes() > 2**20


@pytest.mark.on_cpu
def test_simulated_ranks_share_a_process(monkeypatch: pytest.MonkeyPatch):
    machine(monkeypatch, 0, 2)
    with open_world(Mesh(dp=3), "simulated") as world:
        assert (world.kind, world.main) == ("simulated", True)
        assert (
            world.why
            == f"simulated: 3 ranks in this process on {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)} (asked for)"
        )
        assert [(rank.rank, rank.place, rank.device) for rank in world.local] == [
            (rank, MeshCoordinates(dp=rank), CPU) for rank in range(3)
        ]
        assert in_turns([partial(collect, rank.world, rank.rank) for rank in world.local]) == [[0, 1, 2]] * 3
        assert (
            in_turns([partial(collect, rank.statistics, rank.rank) for rank in world.local])
            == [[0, 1, 2]] * 3
        )
        assert (
            world.local[0].statistics.counts["all_gather"].calls == 2
            and not world.local[0].groups["dp"].counts
        )
    with open_world(Mesh(dp=2)) as world:
        assert "this process was not started as one of 2" in world.why


def test_simulated_groups_along_each_axis_hold_their_own_ranks():
    with open_world(Mesh(dp=2, pp=2, tp=2), "simulated") as world:
        for axis in ("dp", "pp", "tp"):
            seen = in_turns([partial(collect, rank.groups[axis], rank.rank) for rank in world.local])
            assert [tuple(ranks) for ranks in seen] == [world.mesh.group_of(axis, rank) for rank in range(8)]


def test_simulated_ranks_go_round_the_gpus(monkeypatch: pytest.MonkeyPatch):
    machine(monkeypatch, 2, 2)
    with open_world(Mesh(dp=3), "simulated:cuda") as world:
        assert [str(rank.device) for rank in world.local] == ["cuda:0", "cuda:1", "cuda:0"]
        assert world.why == "simulated: 3 ranks in this process on 2 GPUs (asked for)"
