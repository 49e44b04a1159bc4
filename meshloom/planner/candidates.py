"""Plans worth pricing for a job on some devices: data, pipeline and tensor parallelism, and their products.

    4 ranks     dp=1 | dp=2 dp=3 dp=4 | pp=2 pp=3 pp=4 | tp=2 tp=3 tp=4 | dp=2,pp=2  dp=2,tp=2  pp=2,tp=2

A pipeline is priced with a few numbers of microbatches (more of them leave less idle time, but each has a
cost), and with the smallest of them under zb-h1, which leaves less idle time than 1f1b and computes gradients
in two halves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshloom.core.errors import PlanError
from meshloom.core.plan import Plan

ALL_UP_TO = 4  # ranks; above, only powers of two and the number of all ranks
PIECES = 4  # microbatches, to keep activations small
PER_STAGE = (2, 4)  # microbatches for each rank along pp


def candidates(
    num_ranks: int, batch_size: int, *, zero: bool = False, memory_bytes: int = 0, short: bool = False, ranks_per_host: int = 0
) -> Iterator[Plan]:  # fmt: skip
    """Plans of at most `num_ranks` ranks, few ranks first.

    zero: also with optimizer state sharded over replicas. short: whether memory is: microbatches are then priced also
    where no other setting needs them, and gradients and parameters in slices too. memory_bytes: if it is, what a rank
    may hold: stages and shards are then chosen for it. ranks_per_host: so many consecutive ranks are on a host each, so
    that parameters are also sliced within hosts; 0: all are on one.
    """
    short = short or bool(memory_bytes)
    for size in range(1, num_ranks + 1):
        if size > ALL_UP_TO and size != num_ranks and size & (size - 1):
            continue
        for dp, pp, tp in _products(size):
            if dp > batch_size:
                continue
            limit = memory_bytes if pp > 1 or tp > 1 else 0
            pieces = _microbatches(pp, batch_size // dp, short)
            for microbatches in pieces:
                yield Plan(dp=dp, pp=pp, tp=tp, microbatches=microbatches, memory_bytes=limit)
            if pp > 1:
                yield Plan(dp=dp, pp=pp, tp=tp, microbatches=pieces[0], memory_bytes=limit, schedule="zb-h1")
            for level in _levels(dp, zero=zero, short=short):
                for within in [0, *_within_host(dp, tp, ranks_per_host)] if level == 3 else [0]:
                    try:
                        yield Plan(
                            dp=dp, pp=pp, tp=tp, microbatches=pieces[0], memory_bytes=limit, zero=level, zero_within=within
                        )  # fmt: skip
                    except PlanError:  # a level that does not go together with tp or pp
                        continue


def offloading(plan: Plan) -> Plan | None:
    """The same plan with the optimizer's state on a disk; None if it cannot be, or is."""
    try:
        return replace(plan, offload="optimizer") if plan.offload == "none" else None
    except PlanError:
        return None


def _within_host(dp: int, tp: int, ranks_per_host: int) -> list[int]:
    """zero_within for slices inside a host, where the replicas are on several.

    >>> _within_host(16, 1, 8), _within_host(8, 2, 8), _within_host(8, 1, 8), _within_host(16, 1, 0), _within_host(12, 1, 8)
    ([8], [4], [], [], [])
    """
    within = ranks_per_host // tp if ranks_per_host and ranks_per_host % tp == 0 else 0
    return [within] if 1 < within < dp and dp % within == 0 else []


def _levels(dp: int, *, zero: bool, short: bool) -> list[int]:
    """Settings of zero worth pricing: where every replica has its own copies, the state in slices; where memory is
    short, also gradients and parameters.

    >>> _levels(2, zero=True, short=False), _levels(2, zero=False, short=True), _levels(1, zero=True, short=True)
    ([1], [2], [])
    """
    if dp == 1:
        return []
    own = [1, 2, 3] if short else [1]
    return own if zero else own[1:2]  # the one copy of a host divides parameters and state anyway


def _products(size: int) -> list[tuple[int, int, int]]:
    """(dp, pp, tp) with that product.

    >>> _products(2)
    [(2, 1, 1), (1, 2, 1), (1, 1, 2)]
    """
    return [
        (dp, pp, size // dp // pp) for dp in range(size, 0, -1) if size % dp == 0 for pp in range(size // dp, 0, -1) if size // dp % pp == 0
    ]  # fmt: skip


def _microbatches(pp: int, samples: int, short: bool = False) -> list[int]:
    """The numbers for a replica with so many samples: some per stage, at most one per sample.

    >>> _microbatches(1, 64), _microbatches(1, 64, True), _microbatches(2, 64), _microbatches(4, 8), _microbatches(4, 3)
    ([1], [1, 4], [4, 8], [8], [3])
    """
    if pp == 1:
        return sorted({1, min(samples, PIECES)}) if short else [1]
    return sorted({min(samples, each * pp) for each in PER_STAGE})
