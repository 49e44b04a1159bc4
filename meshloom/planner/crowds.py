"""How much slower operators become when ranks compute at the same time, measured by the ranks of a group together.

busy ranks    rank 0   rank 1   rank 2   rank 3
1             works    waits    waits    waits      what the others are compared with
2             works    works    waits    waits      they share the memory's bandwidth
4             works    works    works    works      ... and on fewer than 4 cores the cores
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from meshloom.comm.group import Group
from meshloom.links import Crowd

CROWD_SECONDS = 0.2  # of each kind of operator for each number of busy ranks
_WIDTH = 192  # a product of matrices that stay in a core's cache
_ELEMENTS = 1 << 21  # that do not


def measure_crowds(group: Group, *, seconds: float = CROWD_SECONDS) -> tuple[Crowd, ...]:
    """For 1, 2, 4, ... and all ranks of `group`, which are all there is on this machine's CPU; each rank keeps the threads that it has."""
    rates = {busy: (_rate(group, busy, _products(), seconds), _rate(group, busy, _sums(), seconds)) for busy in _numbers(group.size)}
    compute, memory = rates[1]
    return tuple(
        Crowd(ranks=busy, threads=torch.get_num_threads(), compute=round(compute / products, 4), memory=round(memory / sums, 4))
        for busy, (products, sums) in rates.items()
    )


def _numbers(most: int) -> list[int]:
    """Powers of two, and the most.

    >>> _numbers(6), _numbers(4)
    ([1, 2, 4, 6], [1, 2, 4])
    """
    return sorted({1 << power for power in range(most.bit_length())} | {most})


def _rate(group: Group, busy: int, operate: Callable[[], object], seconds: float) -> float:
    """Operators a second of each of the first `busy` ranks, on average, while they all work; the same on every rank."""
    operate()
    group.barrier().wait()
    mine = torch.zeros(1, dtype=torch.float64)
    if group.rank < busy:
        started = time.perf_counter()
        count = 0
        while time.perf_counter() < started + seconds:
            operate()
            count += 1
        mine += count / (time.perf_counter() - started)
    group.all_reduce(mine).wait()
    return float(mine) / busy


def _products() -> Callable[[], object]:
    a, b, out = (torch.ones(_WIDTH, _WIDTH) for _ in range(3))
    return lambda: torch.mm(a, b, out=out)


def _sums() -> Callable[[], object]:
    a, b, out = (torch.ones(_ELEMENTS) for _ in range(3))
    return lambda: torch.add(a, b, out=out)
