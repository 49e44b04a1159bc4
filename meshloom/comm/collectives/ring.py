"""All-reduce on a ring: each rank sends to the next, twice around.

The elements are N pieces, one per rank. In the first round, partial sums travel and grow; in the second, the
sums travel. N = 3, pieces a b c:

                   rank 0 -> rank 1     rank 1 -> rank 2     rank 2 -> rank 0
    reduce-scatter       c0                   a1                   b2
                         b2+b0                c0+c1                a1+a2           rank 0 has a, rank 1 b, rank 2 c
    all-gather           a                    b                    c
                         c                    a                    b

2(N-1) steps, each moving 1/N of the elements (Patarasuk & Yuan, 2009).
"""

from __future__ import annotations

from collections.abc import Sequence

from meshloom.comm.moves import AllReduceMoves, Move, MoveKind, divided, moved


def ring(rank: int, size: int, num_elements: int) -> AllReduceMoves:
    """The all-reduce moves of `rank` in a ring of all ranks in order.

    >>> [str(move) for move in ring(0, 2, 8).moves(mean=False)]
    ['send [4:8] to 1', 'add [0:4] from 1', 'send [0:4] to 1', 'receive [4:8] from 1']
    """
    ranks, offsets = range(size), divided(0, num_elements, size)
    return AllReduceMoves(
        reduce=reduce_scatter(rank, ranks, offsets),
        owned=(offsets[rank], offsets[rank + 1]),
        gather=all_gather(rank, ranks, offsets),
    )


def reduce_scatter(place: int, ranks: Sequence[int], offsets: Sequence[int]) -> list[Move]:
    """The moves after which the rank at each index of a ring has the sums of the piece of that index.

    place: this rank's index in `ranks`, which are in ring order. offsets: of the pieces, and the end.
    """
    return _around(place, ranks, offsets, first=place - 1, arriving="add")


def all_gather(place: int, ranks: Sequence[int], offsets: Sequence[int]) -> list[Move]:
    """The moves after which every rank of a ring has all pieces, of which each had that of its index.

    Arguments as of `reduce_scatter`.
    """
    return _around(place, ranks, offsets, first=place, arriving="receive")


def _around(
    place: int, ranks: Sequence[int], offsets: Sequence[int], *, first: int, arriving: MoveKind
) -> list[Move]:
    """Once around the ring: send the piece `first`, and in each later step the piece that came before it."""
    n = len(ranks)
    after, before = ranks[(place + 1) % n], ranks[(place - 1) % n]
    moves: list[Move] = []
    for step in range(n - 1):
        out, into = (first - step) % n, (first - step - 1) % n
        moves += moved("send", after, offsets[out], offsets[out + 1])
        moves += moved(arriving, before, offsets[into], offsets[into + 1])
    return moves
