"""A world whose ranks all live in this process: one rank, or several that are simulated."""

from __future__ import annotations

import torch

from meshloom.comm.collectives.explicit import spelled_out
from meshloom.comm.group import Group
from meshloom.comm.recording import RecordedGroup
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.steps import Turns
from meshloom.core.errors import DeviceError
from meshloom.core.mesh import Axis, Mesh
from meshloom.core.units import format_count
from meshloom.launch.devices import Kind
from meshloom.launch.names import rank_name, used_axes, visible_gpus
from meshloom.launch.world import LocalRank, World


def world_in_one_process(mesh: Mesh, devices: str, algorithm: str = "") -> World:
    """All ranks of `mesh` in turns; several go round the GPUs, if on GPUs at all. Raises `DeviceError` if
    there is none.

    algorithm: of `open_world`. Replicas are taken to be on different hosts two by two, so that the
        hierarchical one has something to do.
    """
    num_gpus = torch.cuda.device_count()
    if "cuda" in devices and not num_gpus:
        raise DeviceError(
            f"devices={devices} needs a GPU, and none is visible. Use devices={'simulated' if ':' in devices else 'cpu'}."
        )
    on_gpus = "cuda" in devices or (devices == "auto" and mesh.size == 1 and num_gpus > 0)
    where = [
        torch.device("cuda", rank % num_gpus) if on_gpus else torch.device("cpu") for rank in range(mesh.size)
    ]
    asked = "asked for"
    if mesh.size == 1 and not devices.startswith("simulated"):
        kind: Kind = "cuda" if on_gpus else "cpu"
        reason = asked if devices != "auto" else visible_gpus(num_gpus)
    else:
        kind = "simulated"
        reason = (
            asked
            if devices.startswith("simulated")
            else f"this process was not started as one of {mesh.size}"
        )
    used = (
        format_count(min(num_gpus, mesh.size), "GPU")
        if on_gpus
        else format_count(torch.get_num_threads(), "thread")
    )
    why = f"{kind}: {format_count(mesh.size, 'rank')} in this process on {used} ({reason})"

    turns = Turns()
    everyone = simulated_groups(mesh.size, turns)
    groups: dict[tuple[Axis, int], Group] = {}
    statistics: dict[int, Group] = {}
    for axis in used_axes(mesh):
        for members in mesh.groups(axis):
            made: list[Group] = [*simulated_groups(len(members), turns)]
            if algorithm and axis == "dp":
                hosts = [number // 2 for number in range(len(members))]
                made = [
                    spelled_out(group, algorithm, hosts=hosts, name=rank_name(rank, mesh))
                    for rank, group in zip(members, made, strict=True)
                ]
            groups.update(zip([(axis, rank) for rank in members], made, strict=True))
    readers: dict[int, Group] = {}
    teams: dict[int, Group] = {}
    for members in mesh.groups("dp"):
        statistics.update(zip(members, simulated_groups(len(members), turns), strict=True))
        readers.update(zip(members, simulated_groups(len(members), turns), strict=True))
    for members in mesh.teams() if mesh.size > mesh.dp else ():
        teams.update(zip(members, simulated_groups(len(members), turns), strict=True))
    local = [
        LocalRank(
            rank=rank,
            place=mesh.place(rank),
            device=where[rank],
            groups={axis: RecordedGroup(groups[axis, rank], axis) for axis in used_axes(mesh)},
            statistics=RecordedGroup(statistics[rank], "dp"),
            world=everyone[rank],
            team=teams.get(rank),
            readers=readers[rank] if mesh.size > mesh.dp else everyone[rank],
        )
        for rank in range(mesh.size)
    ]
    return World(mesh, local, kind, why, turns)
