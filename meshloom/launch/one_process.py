"""A world whose ranks are all in this process: one rank, or several simulated ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from meshloom.comm.collectives.ring import ring_group
from meshloom.comm.group import Group
from meshloom.comm.simulated import simulated_groups
from meshloom.core.errors import DeviceError
from meshloom.core.mesh import Mesh
from meshloom.core.units import format_count
from meshloom.launch.allocator import share_freed_memory
from meshloom.launch.devices import Kind
from meshloom.launch.names import rank_name, visible_gpus
from meshloom.launch.world import REDUCES, LocalRank, Use, World, connect_rank


def world_in_one_process(
    mesh: Mesh, devices: str, *, of_a_host: bool = False, ring: bool = False, saving: bool = False
) -> World:
    """All ranks of `mesh`, which run in turns; on GPUs, which must be there, they are assigned round-robin.

    of_a_host: whether ranks can share memory. ring, saving: as for `open_world`.
    """
    num_gpus = torch.cuda.device_count()
    if "cuda" in devices and not num_gpus:
        raise DeviceError(
            f"devices={devices} needs a GPU, and none is visible. Use devices={'simulated' if ':' in devices else 'cpu'}."
        )
    on_gpus = "cuda" in devices or (devices == "auto" and mesh.size == 1 and num_gpus > 0)
    ranks = range(mesh.size)
    used = format_count(torch.get_num_threads() if mesh.size == 1 else 1, "thread")
    where = [torch.device("cpu") for _ in ranks]
    if on_gpus:
        used = format_count(min(num_gpus, mesh.size), "GPU")
        where = [torch.device("cuda", rank % num_gpus) for rank in ranks]
    if mesh.size > 1:
        share_freed_memory()
    kind: Kind = "simulated"
    reason = f"this process was not started as one of {mesh.size}"
    if devices.startswith("simulated"):
        reason = "asked for"
    elif mesh.size == 1:
        kind = "cuda" if on_gpus else "cpu"
        reason = "asked for" if devices != "auto" else visible_gpus(num_gpus)
    why = f"{kind}: {format_count(mesh.size, 'rank')} in this process on {used} ({reason})"

    def wrap(groups: Sequence[Group], members: Sequence[int], use: Use) -> Sequence[Group]:
        if use not in REDUCES or not ring:
            return groups
        return [
            ring_group(group, name=rank_name(rank, mesh)) for rank, group in zip(members, groups, strict=True)
        ]

    return World(mesh, simulated_ranks(mesh, where, wrap, of_a_host=of_a_host, saving=saving), kind, why)


def simulated_ranks(
    mesh: Mesh, devices: Sequence[torch.device],
    wrap: Callable[[Sequence[Group], Sequence[int], Use], Sequence[Group]], *, of_a_host: bool = False, saving: bool = False,
) -> list[LocalRank]:  # fmt: skip
    """All ranks of `mesh`, in this process. devices: of each.

    wrap: what ranks use in place of simulated groups; given these, the ranks that they connect, and what for.
    of_a_host, saving: as for `world_in_one_process`.
    """
    groups: dict[tuple[Use, tuple[int, ...]], Sequence[Group]] = {}

    def connect(rank: int, members: Sequence[Sequence[int]], use: Use) -> Group:
        mine = next(tuple(each) for each in members if rank in each)
        if (use, mine) not in groups:
            groups[use, mine] = wrap(simulated_groups(len(mine), of_a_host=of_a_host), mine, use)
        return groups[use, mine][mine.index(rank)]

    return [
        connect_rank(mesh, rank, device, partial(connect, rank), saving=saving)
        for rank, device in enumerate(devices)
    ]
