"""Seconds of every collective among the ranks of a group, measured by all of them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshloom.comm.group import Group
from meshloom.comm.hosts import HostsGroup
from meshloom.comm.record import RecordedGroup
from meshloom.comm.shm import ShmGroup
from meshloom.comm.windows import Extent, Windows, in_window, window_bytes, windows_of
from meshloom.links import COLLECTIVES, Collective, Link, Where, fit_link
from meshloom.planner.timing import now, typical

SUMS: tuple[Collective, ...] = ("all_reduce", "reduce_scatter")
LINK_SECONDS = 0.9  # for all collectives of one group
MESSAGE_BYTES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)
RUNS = (4, 200)  # least and most repetitions of one size


def measure_links(group: Group, device: torch.device, *, among: int, place: Where, seconds: float = LINK_SECONDS) -> tuple[Link, ...]:
    """Seconds of each collective of `group`, which all its ranks measure together. Each rank gets what it saw; rank 0's is used.

    among: ranks of all groups that measure now. place: whether the group's ranks are on one host.
    Sums are measured a second time where ranks can have memory in common, on tensors that lie there, as gradients do.
    """
    windows = windows_of(group) if device.type == "cpu" else None
    wanted: Sequence[tuple[Collective, bool]] = [(each, False) for each in COLLECTIVES]
    if windows:
        wanted = [*wanted, *((each, True) for each in SUMS)]
    links: list[Link] = []
    for collective, in_place in wanted:
        measured: list[tuple[float, float]] = []
        for num_bytes in MESSAGE_BYTES:
            count = num_bytes // 4 // group.size * group.size  # elements, the same for each rank
            tensor = _in_window(windows, group, count) if windows and in_place else torch.zeros(count, device=device)
            operate = _collective(collective, group, tensor)
            operate()
            _wait_for_all(group, device)
            took = _once(operate, device)
            # All ranks must agree how often: rank 0's first measurement decides.
            runs = _agreed_runs(group, seconds / len(wanted) / len(MESSAGE_BYTES) / max(took, 1e-6), device)
            times = _PER_CALL.get(collective, lambda _: 1)(group.size)
            measured.append((count * 4, typical([_once(operate, device) for _ in range(runs)])[0] / times))
        links.append(fit_link(collective, group.size, measured, among=among, place=place, in_place=in_place, keep_points=True))
    return tuple(links)


def transport_of(group: Group, device: torch.device) -> str:
    """What a group talks through, in one word: shm, gloo, nccl, or shm+gloo for ranks of several hosts."""
    inner = group.group if isinstance(group, RecordedGroup) else group
    if isinstance(inner, ShmGroup):
        return "shm"
    if isinstance(inner, HostsGroup):
        return "shm+gloo"
    return "nccl" if device.type == "cuda" else "gloo"


def _in_window(windows: Windows, group: Group, count: int) -> Tensor:
    extents = [Extent(num_elements=count, dtype=torch.float32, device=torch.device("cpu"))]
    return in_window(windows.window(window_bytes(extents)), group.rank, extents)[0]


def _collective(collective: Collective, group: Group, tensor: Tensor) -> Callable[[], Any]:
    """Does it once, each rank handing in a flat `tensor`; what has a direction goes round, so that no rank runs ahead."""
    size, count, device = group.size, tensor.numel(), tensor.device
    if collective == "all_reduce":
        return lambda: group.all_reduce(tensor).wait()
    if collective == "all_gather":
        gathered = torch.empty(size * count, device=device)
        return lambda: group.all_gather(gathered, tensor).wait()
    if collective == "reduce_scatter":
        part = torch.empty(count // size, device=device)
        return lambda: group.reduce_scatter(part, tensor).wait()
    if collective == "all_to_all":
        received = torch.empty(count, device=device)
        shares = [count // size] * size
        return lambda: group.all_to_all(received, tensor, shares, shares).wait()
    if collective == "gather":
        outputs = [torch.empty_like(tensor) for _ in range(size)]
        return lambda: [group.gather(outputs if group.rank == where else None, tensor, where).wait() for where in range(size)]
    if collective == "broadcast":
        return lambda: [group.broadcast(tensor, source).wait() for source in range(size)]

    def ping_pong() -> None:
        """Rank 0 and rank 1 only."""
        if group.rank == 0:
            group.send(tensor, 1).wait()
            group.recv(tensor, 1).wait()
        elif group.rank == 1:
            group.recv(tensor, 0).wait()
            group.send(tensor, 0).wait()

    return ping_pong


_PER_CALL: dict[Collective, Callable[[int], int]] = {"broadcast": lambda size: size, "gather": lambda size: size, "send": lambda _: 2}


def _agreed_runs(group: Group, wanted: float, device: torch.device) -> int:
    runs = torch.tensor([min(max(wanted, RUNS[0]), RUNS[1])], dtype=torch.float32, device=device)
    group.broadcast(runs, 0).wait()
    return int(runs.item())


def _wait_for_all(group: Group, device: torch.device) -> None:
    group.barrier().wait()
    now(device)


def _once(operate: Callable[[], Any], device: torch.device) -> float:
    started = now(device)
    operate()
    return now(device) - started
