"""All-reduce on a ring: each rank sends to the next, twice around.

Elements in N pieces, one per rank. In the first round sums grow as they travel; then they travel once more. N
= 3, pieces a b c:

                   rank 0 -> rank 1     rank 1 -> rank 2     rank 2 -> rank 0
    scatter-reduce       c0                   a1                   b2
                         b2+b0                c0+c1                a1+a2           rank 0 has a, rank 1 b, rank 2 c
    all-gather           a                    b                    c
                         c                    a                    b

2(N-1) steps, each moving 1/N of the elements (Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms",
2009).
"""

from __future__ import annotations

from collections.abc import Sequence

from meshloom.comm.moves import AllReduceMoves, Move, divided, moved


def ring(rank: int, size: int, num_elements: int) -> AllReduceMoves:
    """Of `rank` in a ring of all ranks in order.

    >>> [str(move) for move in ring(0, 2, 8).moves(mean=False)]
    ['send [4:8] to 1', 'add [0:4] from 1', 'send [0:4] to 1', 'receive [4:8] from 1']
    """
    ranks, offsets = range(size), divided(0, num_elements, size)
    return AllReduceMoves(
        reduce=scatter_reduce(rank, ranks, offsets),
        owned=(offsets[rank], offsets[rank + 1]),
        gather=all_gather(rank, ranks, offsets),
    )


def scatter_reduce(place: int, ranks: Sequence[int], offsets: Sequence[int]) -> list[Move]:
    """Until the rank at each place of a ring has the sums of the piece with the number of its place.

    place: this rank's in `ranks`, which are in order of the ring. offsets: where the pieces begin, and the
        end.
    """
    n = len(ranks)
    after, before = ranks[(place + 1) % n], ranks[(place - 1) % n]
    moves: list[Move] = []
    for step in range(n - 1):
        out, into = (place - step - 1) % n, (place - step - 2) % n
        moves += moved("send", after, offsets[out], offsets[out + 1]) + moved(
            "add", before, offsets[into], offsets[into + 1]
        )
    return moves


def all_gather(place: int, ranks: Sequence[int], offsets: Sequence[int]) -> list[Move]:
    """Until every rank of a ring has all pieces, of which each had the one with the number of its place.
    Arguments as above."""
    n = len(ranks)
    after, before = ranks[(place + 1) % n], ranks[(place - 1) % n]
    moves: list[Move] = []
    for step in range(n - 1):
        out, into = (place - step) % n, (place - step - 1) % n
        moves += moved("send", after, offsets[out], offsets[out + 1]) + moved(
            "receive", before, offsets[into], offsets[into + 1]
        )
    return moves
