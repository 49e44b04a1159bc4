"""A world whose ranks are all in this process: one rank, or several simulated ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from meshloom.comm.collectives.explicit import explicit_group
from meshloom.comm.group import Group
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.steps import Turns
from meshloom.core.errors import DeviceError
from meshloom.core.mesh import Mesh
from meshloom.core.units import format_count
from meshloom.launch.devices import Kind
from meshloom.launch.names import rank_name, visible_gpus
from meshloom.launch.world import LocalRank, Use, World, connect_rank


def world_in_one_process(mesh: Mesh, devices: str, algorithm: str = "") -> World:
    """All ranks of `mesh`, which run in turns; on GPUs they are assigned round-robin. Raises `DeviceError` if
    there is no GPU.

    algorithm: as for `open_world`. Each two replicas are assumed to share a host, so that the hierarchical
        one has two levels.
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

    def wrap(made: Sequence[Group], members: Sequence[int], use: Use) -> Sequence[Group]:
        if use != "dp" or not algorithm:
            return made
        hosts = [number // 2 for number in range(len(members))]
        return [
            explicit_group(group, algorithm, hosts=hosts, name=rank_name(rank, mesh))
            for rank, group in zip(members, made, strict=True)
        ]

    turns = Turns()
    return World(mesh, simulated_ranks(mesh, where, turns, wrap), kind, why, turns)


def simulated_ranks(
    mesh: Mesh,
    devices: Sequence[torch.device],
    turns: Turns,
    wrap: Callable[[Sequence[Group], Sequence[int], Use], Sequence[Group]],
) -> list[LocalRank]:
    """All ranks of `mesh`, in this process. devices: of each.

    wrap: what ranks use in place of simulated groups; given these, the ranks that they connect, and what for.
    """
    made: dict[tuple[Use, tuple[int, ...]], Sequence[Group]] = {}

    def connect(rank: int, members: Sequence[Sequence[int]], use: Use) -> Group:
        mine = next(tuple(each) for each in members if rank in each)
        if (use, mine) not in made:
            made[use, mine] = wrap(simulated_groups(len(mine), turns), mine, use)
        return made[use, mine][mine.index(rank)]

    return [connect_rank(mesh, rank, device, partial(connect, rank)) for rank, device in enumerate(devices)]
