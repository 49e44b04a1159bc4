"""Seconds of every collective among the ranks of a group, measured by all of them together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshloom.cluster import COLLECTIVES, Collective, Link, fit_link
from meshloom.comm.group import Group
from meshloom.planner.timing import now, typical

LINK_SECONDS = 1.2  # for all collectives of one group
MESSAGE_BYTES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)
RUNS = (4, 200)  # least and most repetitions of one size


def measure_links(group: Group, device: torch.device, *, seconds: float = LINK_SECONDS) -> tuple[Link, ...]:
    """Seconds of each collective of `group`, which all its ranks measure together. Each rank gets what it saw; rank 0's is used."""
    links: list[Link] = []
    for collective in COLLECTIVES:
        measured: list[tuple[float, float]] = []
        for num_bytes in MESSAGE_BYTES:
            count = num_bytes // 4 // group.size * group.size  # elements, the same for each rank
            operate = _collective(collective, group, count, device)
            operate()
            _wait_for_all(group, device)
            took = _once(operate, device)
            # All ranks must agree how often: rank 0's first measurement decides.
            runs = _agreed_runs(group, seconds / len(COLLECTIVES) / len(MESSAGE_BYTES) / max(took, 1e-6), device)
            measured.append(
                (count * 4, typical([_once(operate, device) for _ in range(runs)])[0] / _PER_CALL.get(collective, lambda _: 1)(group.size))
            )
        links.append(fit_link(collective, group.size, measured))
    return tuple(links)


def _collective(collective: Collective, group: Group, count: int, device: torch.device) -> Callable[[], Any]:
    """Does it once, each rank handing in `count` float32 elements; what has a direction goes round, so that no rank runs ahead."""
    tensor, size = torch.zeros(count, device=device), group.size
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


_PER_CALL: dict[Collective, Callable[[int], int]] = {"broadcast": lambda size: size, "send": lambda _: 2}


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
