"""Seconds of every collective among the ranks of a group, measured by all of them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshloom.comm.collectives.ring import ring_group
from meshloom.comm.group import Group
from meshloom.comm.network.hosts import HostsGroup
from meshloom.comm.recording import RecordedGroup
from meshloom.comm.shm.shared_memory import ShmGroup
from meshloom.comm.windows import Extent, Windows, in_window, window_bytes, windows_of
from meshloom.machine.links import COLLECTIVES, Collective, Link, Where, fit_link
from meshloom.planner.measure.timing import now, typical

SUMS: tuple[Collective, ...] = ("all_reduce", "reduce_scatter")
LINK_SECONDS = 0.5  # for all collectives of one group
RING_SECONDS = 0.1  # for the all-reduce on messages
MESSAGE_BYTES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)
RUNS = (4, 200)  # least and most repetitions of one size
# of each rank: repetitions take turns with its pieces, as tensors that a step hands over are no longer in a
# cache
POOL_BYTES = 32 << 20


def measure_links(
    group: Group, device: torch.device, *, among: int, place: Where, seconds: float = LINK_SECONDS
) -> tuple[Link, ...]:
    """Seconds of each collective of `group`, which all its ranks measure together. Each rank gets what it
    saw; rank 0's is used.

    among: ranks of all groups that measure now. place: whether the group's ranks are on one host.
    Sums are measured a second time where ranks can have memory in common, on tensors that lie there, as
    gradients do.
    """
    windows = windows_of(group) if device.type == "cpu" else None
    pool = _Pool(_filled(POOL_BYTES, device))
    results = _Pool(_filled(max(POOL_BYTES, group.size * MESSAGE_BYTES[-1]), device))
    common = _Pool(_in_window(windows, group, POOL_BYTES // 4).zero_()) if windows else pool
    wanted: Sequence[tuple[Collective, bool]] = [(each, False) for each in COLLECTIVES]
    if windows:
        wanted = [*wanted, *((each, True) for each in SUMS)]
    links: list[Link] = []
    for collective, in_place in wanted:
        times = _PER_CALL.get(collective, lambda _: 1)(group.size)
        operation = partial(
            _collective, collective, group, pool=common if in_place else pool, results=results
        )
        measured = _measured(group, device, operation, seconds=seconds / len(wanted))
        points = [(num_bytes, took / times) for num_bytes, took in measured]
        links.append(
            fit_link(
                collective, group.size, points, among=among, place=place, in_place=in_place, keep_points=True
            )
        )
    return tuple(links)


def measure_ring(group: Group, device: torch.device, *, place: Where, seconds: float = RING_SECONDS) -> Link:
    """The same for the all-reduce on a ring of messages of `group`, which are all running ranks."""
    pool = _Pool(_filled(POOL_BYTES, device))
    on_ring = ring_group(group)
    try:
        measured = _measured(
            group, device, lambda count: lambda: on_ring.all_reduce(pool(count)).wait(), seconds=seconds
        )
    finally:
        on_ring.close()
    link = fit_link("all_reduce", group.size, measured, among=group.size, place=place, keep_points=True)
    return replace(link, algorithm="ring")


def _measured(
    group: Group, device: torch.device, operation: Callable[[int], Callable[[], Any]], *, seconds: float
) -> list[tuple[float, float]]:
    """(bytes, typical seconds) of an operation on so many elements, at each size. seconds: for all of
    them."""
    measured: list[tuple[float, float]] = []
    for num_bytes in MESSAGE_BYTES:
        count = num_bytes // 4 // group.size * group.size  # elements, the same for each rank
        operate = operation(count)
        operate()
        _wait_for_all(group, device)
        took = _once(operate, device)
        # All ranks must agree how often: rank 0's first measurement decides.
        runs = _agreed_runs(group, seconds / len(MESSAGE_BYTES) / max(took, 1e-6), device)
        measured.append((count * 4, typical([_once(operate, device) for _ in range(runs)])[0]))
    return measured


def transport_of(group: Group, device: torch.device) -> str:
    """The transport of a group, in one word: shm, gloo, nccl, or shm+gloo for ranks of several hosts."""
    inner = group.group if isinstance(group, RecordedGroup) else group
    if isinstance(inner, ShmGroup):
        return "shm"
    if isinstance(inner, HostsGroup):
        return "shm+gloo"
    return "nccl" if device.type == "cuda" else "gloo"


def _in_window(windows: Windows, group: Group, count: int) -> Tensor:
    extents = [Extent(num_elements=count, dtype=torch.float32, device=torch.device("cpu"))]
    return in_window(windows.window(window_bytes(extents)), group.rank, extents)[0]


class _Pool:
    """Memory of which every call returns the next piece, starting over at its end."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat
        self._at = 0

    def __call__(self, count: int) -> Tensor:
        """That many elements; at most all."""
        if self._at + count > self._flat.numel():
            self._at = 0
        self._at += count
        return self._flat[self._at - count : self._at]


def _filled(num_bytes: int, device: torch.device) -> Tensor:
    """A written float32 tensor. Memory that was never written is one page of zeros, which is read from the
    cache."""
    return torch.empty(num_bytes // 4, device=device).zero_()


def _collective(
    collective: Collective, group: Group, count: int, pool: _Pool, results: _Pool
) -> Callable[[], Any]:
    """Runs it once, each rank handing in `count` elements of `pool`. Operations with a source or destination
    use all ranks in turn, so that no rank runs ahead."""
    size = group.size
    if collective == "all_reduce":
        return lambda: group.all_reduce(pool(count)).wait()
    if collective == "all_gather":
        return lambda: group.all_gather(results(size * count), pool(count)).wait()
    if collective == "reduce_scatter":
        return lambda: group.reduce_scatter(results(count // size), pool(count)).wait()
    if collective == "all_to_all":
        shares = [count // size] * size
        return lambda: group.all_to_all(results(count), pool(count), shares, shares).wait()
    if collective == "gather":

        def gather(where: int) -> None:
            outputs = list(results(size * count).chunk(size)) if group.rank == where else None
            group.gather(outputs, pool(count), where).wait()

        return lambda: [gather(where) for where in range(size)]
    if collective == "broadcast":
        return lambda: [group.broadcast(pool(count), source).wait() for source in range(size)]

    def ping_pong() -> None:
        """Rank 0 and rank 1 only."""
        tensor = pool(count)
        if group.rank == 0:
            group.send(tensor, 1).wait()
            group.recv(tensor, 1).wait()
        elif group.rank == 1:
            group.recv(tensor, 0).wait()
            group.send(tensor, 0).wait()

    return ping_pong


_PER_CALL: dict[Collective, Callable[[int], int]] = {
    "broadcast": lambda size: size,
    "gather": lambda size: size,
    "send": lambda _: 2,
}


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
