"""How much slower operators become when several ranks compute at the same time, measured by the ranks of a
group together.

    busy ranks    rank 0   rank 1   rank 2   rank 3
    1             works    waits    waits    waits      the baseline
    2             works    works    waits    waits      they share the memory's bandwidth
    4             works    works    works    works      not on fewer than 4 cores: time slicing on them varies too much
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch

from meshloom.comm.group import Group
from meshloom.machine.cores import cores
from meshloom.machine.links import Crowd

PIECE_SECONDS = 0.02  # of one kind of operator, alone: as long as a small step
ROUNDS = 5  # over all numbers of ranks: what disturbs the machine for a while disturbs one
_WIDTH = 192  # a product of matrices that stay in a core's cache
# of sums: in the cache that cores share, also when all of them are busy; and in no cache, also when one is
_ELEMENTS = (1 << 17, 1 << 22)


def measure_crowds(group: Group, *, seconds: float = PIECE_SECONDS) -> tuple[Crowd, ...]:
    """For 1, 2, 4, ... and as many ranks of `group` as there are cores for, the only ones on this machine's
    CPU; each with its threads.

    All busy ranks do the same work, and the last one to finish counts, as in a step. seconds: of each one's
    work, alone.

    For memory the geometric mean of both kinds of sums: between them there is a cliff, where the data of all
    busy ranks no longer fits into the cache, and a job may be on either side.
    """
    operators = [_products(), *map(_sums, _ELEMENTS)]
    counts = [_count(group, operate, seconds) for operate in operators]
    numbers = powers_and_most(max(1, min(group.size, cores() // torch.get_num_threads())))
    rounds = [
        [[_seconds(group, busy, *each) for each in zip(operators, counts, strict=True)] for busy in numbers]
        for _ in range(ROUNDS)
    ]
    took = [
        [statistics.median(each) for each in zip(*of_busy, strict=True)]
        for of_busy in zip(*rounds, strict=True)
    ]
    found: list[Crowd] = []
    for busy, mine in zip(numbers, took, strict=True):
        compute, *memory = (now / alone for alone, now in zip(took[0], mine, strict=True))
        found.append(
            Crowd(
                ranks=busy,
                threads=torch.get_num_threads(),
                compute=round(compute, 4),
                memory=round(math.prod(memory) ** (1 / len(memory)), 4),
            )
        )
    return tuple(found)


def powers_and_most(most: int) -> list[int]:
    """Powers of two, and the most.

    >>> powers_and_most(6), powers_and_most(4)
    ([1, 2, 4, 6], [1, 2, 4])
    """
    return sorted({1 << power for power in range(most.bit_length())} | {most})


def _count(group: Group, operate: Callable[[], object], seconds: float) -> int:
    """How many operators take rank 0 so long, while the others wait; the same on every rank."""
    count = torch.zeros(1, dtype=torch.int64)
    operate()
    group.barrier().wait()
    if group.rank == 0:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            operate()
            count += 1
    group.broadcast(count, 0).wait()
    return max(1, int(count))


def _seconds(group: Group, busy: int, operate: Callable[[], object], count: int) -> float:
    """Until each of the first `busy` ranks has run so many operators; nearly equal on all ranks."""
    group.barrier().wait()
    started = time.perf_counter()
    if group.rank < busy:
        for _ in range(count):
            operate()
    group.barrier().wait()
    return time.perf_counter() - started


def _products() -> Callable[[], object]:
    a, b, out = (torch.ones(_WIDTH, _WIDTH) for _ in range(3))
    return lambda: torch.mm(a, b, out=out)


def _sums(elements: int) -> Callable[[], object]:
    a, b, out = (torch.ones(elements) for _ in range(3))
    return lambda: torch.add(a, b, out=out)
