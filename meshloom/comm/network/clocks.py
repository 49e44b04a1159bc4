"""Clock offsets between ranks, measured by messages between rank 0 and each other rank.

    rank 0   sent |------ request ------>                |  received
    rank r                        its clock |------ reply ------>

Rank r read its clock somewhere between `sent` and `received` (Cristian, 1989). Of several round trips the
fastest is the most precise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from meshloom.comm.group import Group
from meshloom.comm.objects import share

ROUND_TRIPS = 15


@dataclass(frozen=True, kw_only=True)
class Offset:
    """The offset of a rank's clock.

    seconds: by which it is ahead of rank 0's. error_seconds: maximum error of that, in either direction.
    """

    seconds: float
    error_seconds: float


def clock_offsets(
    group: Group, round_trips: int = ROUND_TRIPS, clock: Callable[[], float] = time.perf_counter
) -> list[Offset]:
    """The offsets of all ranks, on every rank; all ranks call it. group: of CPU tensors. clock: in seconds.

    Processes of one host share a clock, so an offset that is not larger than its error is reported as 0.
    """
    offsets = [(0.0, 0.0)]
    for other in range(1, group.size):
        best = (0.0, float("inf"))
        for _ in range(round_trips):
            seconds, error = _round_trip(group, other, clock)
            best = min(best, (seconds, error), key=lambda each: each[1])
        offsets.append(best if abs(best[0]) > best[1] else (0.0, best[1]))
    offsets = share(group, offsets)  # measured on rank 0
    return [Offset(seconds=seconds, error_seconds=error) for seconds, error in offsets]


def _round_trip(group: Group, other: int, clock: Callable[[], float]) -> tuple[float, float]:
    """The offset and its error, on rank 0."""
    message = torch.zeros(1, dtype=torch.float64)
    if group.rank == 0:
        sent = clock()
        group.send(message, other).wait()
        group.recv(message, other).wait()
        received = clock()
        return float(message) - (sent + received) / 2, (received - sent) / 2
    if group.rank == other:
        group.recv(message, 0).wait()
        group.send(message.fill_(clock()), 0).wait()
    return 0.0, 0.0
