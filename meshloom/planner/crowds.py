"""How much slower operators become when ranks compute at the same time, measured by the ranks of a group together.

busy ranks    rank 0   rank 1   rank 2   rank 3
1             works    waits    waits    waits      what the others are compared with
2             works    works    waits    waits      they share the memory's bandwidth
4             works    works    works    works      ... and on fewer than 4 cores the cores
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch

from meshloom.comm.group import Group
from meshloom.links import Crowd

CROWD_SECONDS = 0.15  # of each kind of operator for each number of busy ranks, in all rounds
ROUNDS = 3  # over all numbers of ranks: what disturbs the machine for a while disturbs one
_WIDTH = 192  # a product of matrices that stay in a core's cache
_ELEMENTS = (1 << 17, 1 << 22)  # of sums: in the cache that cores share, also when all of them are busy; and in no cache, also when one is


def measure_crowds(group: Group, *, seconds: float = CROWD_SECONDS) -> tuple[Crowd, ...]:
    """For 1, 2, 4, ... and all ranks of `group`, which are all there is on this machine's CPU; each rank keeps the threads that it has.

    Of memory the geometric mean of both kinds of sums. Between them lies a cliff, on either side of which a job may be: where all busy ranks together
    have as much as the cache holds.
    """
    operators = [_products(), *map(_sums, _ELEMENTS)]
    numbers = _numbers(group.size)
    rounds = [[[_rate(group, busy, operate, seconds / ROUNDS) for operate in operators] for busy in numbers] for _ in range(ROUNDS)]
    rates = [[statistics.median(each) for each in zip(*of_busy, strict=True)] for of_busy in zip(*rounds, strict=True)]
    found: list[Crowd] = []
    for busy, mine in zip(numbers, rates, strict=True):
        compute, *memory = (alone / now for alone, now in zip(rates[0], mine, strict=True))
        found.append(
            Crowd(ranks=busy, threads=torch.get_num_threads(), compute=round(compute, 4), memory=round(math.prod(memory) ** (1 / len(memory)), 4))
        )
    return tuple(found)


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


def _sums(elements: int) -> Callable[[], object]:
    a, b, out = (torch.ones(elements) for _ in range(3))
    return lambda: torch.add(a, b, out=out)
