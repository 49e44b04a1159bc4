"""How far the clocks of ranks are apart, measured by messages between rank 0 and each other rank.

    rank 0   sent |------ there ------>              |  came back
    rank r                      its clock |------ back ------>

The answer was read somewhere between `sent` and `came back` (Cristian, 1989). Of several round trips the
fastest says most.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from meshloom.comm.group import Group
from meshloom.comm.objects import share
from meshloom.comm.steps import Steps

ROUND_TRIPS = 15


@dataclass(frozen=True, kw_only=True)
class Offset:
    """seconds: how much a rank's clock is ahead of rank 0's. error_seconds: by how much that may be wrong,
    either way."""

    seconds: float
    error_seconds: float


def clock_offsets(
    group: Group, round_trips: int = ROUND_TRIPS, clock: Callable[[], float] = time.perf_counter
) -> Steps[list[Offset]]:
    """Of every rank, on every rank; all ranks call it. group: of CPU tensors. clock: this rank's, in seconds.

    Processes of one host share a clock. So an offset that cannot be told from none is none.
    """
    found = [(0.0, 0.0)]
    for other in range(1, group.size):
        best = (0.0, float("inf"))
        for _ in range(round_trips):
            seconds, error = yield from _round_trip(group, other, clock)
            best = min(best, (seconds, error), key=lambda each: each[1])
        found.append(best if abs(best[0]) > best[1] else (0.0, best[1]))
    found = yield from share(group, found)  # rank 0 has measured
    return [Offset(seconds=seconds, error_seconds=error) for seconds, error in found]


def _round_trip(group: Group, other: int, clock: Callable[[], float]) -> Steps[tuple[float, float]]:
    """The offset and its error, on rank 0. Every rank yields twice, whatever its part."""
    message = torch.zeros(1, dtype=torch.float64)
    if group.rank == 0:
        sent = clock()
        work = group.send(message, other)
        yield
        work.wait()
        work = group.recv(message, other)
        yield
        work.wait()
        came_back = clock()
        return float(message) - (sent + came_back) / 2, (came_back - sent) / 2
    work = group.recv(message, 0) if group.rank == other else None
    yield
    if work:
        work.wait()
        work = group.send(message.fill_(clock()), 0)
    yield
    if work:
        work.wait()
    return 0.0, 0.0
