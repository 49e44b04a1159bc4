"""Plans worth pricing for a job on some devices: data, pipeline and tensor parallelism, and their products.

    4 ranks     dp=1 | dp=2 dp=3 dp=4 | pp=2 pp=3 pp=4 | tp=2 tp=3 tp=4 | dp=2,pp=2  dp=2,tp=2  pp=2,tp=2

A pipeline is tried with a few microbatches (more of them leave less idle, and each costs something), and with
the fewest of them under zb-h1, which leaves less idle than 1f1b and computes gradients in two halves.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshloom.core.plan import Plan

ALL_UP_TO = 4  # ranks; of more, only products that are powers of two, and those that use all of them
PIECES = 4  # microbatches that keep activations small
PER_STAGE = (2, 4)  # microbatches for each rank along pp


def candidates(
    num_ranks: int, batch_size: int, *, zero: bool = False, memory_bytes: int = 0
) -> Iterator[Plan]:
    """At most `num_ranks` ranks, few ranks first.

    zero: with optimizer state divided over replicas, too. memory_bytes: where memory is short, what a rank
    may hold: parts of the model are then chosen so, and microbatches are tried where nothing else asks for
    them.
    """
    for size in range(1, num_ranks + 1):
        if size > ALL_UP_TO and size != num_ranks and size & (size - 1):
            continue
        for dp, pp, tp in _products(size):
            if dp > batch_size:
                continue
            limit = memory_bytes if pp > 1 or tp > 1 else 0
            pieces = _microbatches(pp, batch_size // dp, bool(memory_bytes))
            for microbatches in pieces:
                yield Plan(dp=dp, pp=pp, tp=tp, microbatches=microbatches, memory_bytes=limit)
            if pp > 1:
                yield Plan(dp=dp, pp=pp, tp=tp, microbatches=pieces[0], memory_bytes=limit, schedule="zb-h1")
            if zero and dp > 1:
                yield Plan(dp=dp, pp=pp, tp=tp, microbatches=pieces[0], memory_bytes=limit, zero=1)


def _products(size: int) -> list[tuple[int, int, int]]:
    """(dp, pp, tp) whose product it is.

    >>> _products(2)
    [(2, 1, 1), (1, 2, 1), (1, 1, 2)]
    """
    return [
        (dp, pp, size // dp // pp) for dp in range(size, 0, -1) if size % dp == 0 for pp in range(size // dp, 0, -1) if size // dp % pp == 0
    ]  # fmt: skip


def _microbatches(pp: int, samples: int, short: bool = False) -> list[int]:
    """For a replica with so many samples: some per stage, as far as there are samples.

    >>> _microbatches(1, 64), _microbatches(1, 64, True), _microbatches(2, 64), _microbatches(4, 8), _microbatches(4, 3)
    ([1], [1, 4], [4, 8], [8], [3])
    """
    if pp == 1:
        return sorted({1, min(samples, PIECES)}) if short else [1]
    return sorted({min(samples, each * pp) for each in PER_STAGE})
