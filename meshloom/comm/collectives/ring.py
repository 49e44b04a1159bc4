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

from meshloom.comm.moves import Move, MoveKind, moved, piece_offsets


def all_reduce(rank: int, size: int, num_elements: int, *, mean: bool) -> list[Move]:
    """The moves of `rank` after which all ranks have all sums. mean: each is divided once, where it is complete.

    >>> [str(move) for move in all_reduce(0, 2, 8, mean=False)]
    ['send [4:8] to 1', 'add [0:4] from 1', 'send [0:4] to 1', 'receive [4:8] from 1']
    """
    offsets = piece_offsets(num_elements, size)
    divide = moved("divide", -1, offsets[rank], offsets[rank + 1]) if mean else []
    return [*reduce_scatter(rank, offsets), *divide, *all_gather(rank, offsets)]


def reduce_scatter(rank: int, offsets: Sequence[int]) -> list[Move]:
    """The moves of `rank` after which each rank has the sums of the piece of its number.

    offsets: of the pieces, and the end.
    """
    return _around(rank, offsets, first=rank - 1, arriving="add")


def all_gather(rank: int, offsets: Sequence[int]) -> list[Move]:
    """The moves of `rank` after which every rank has all pieces, of which each had that of its number.

    Arguments as of `reduce_scatter`.
    """
    return _around(rank, offsets, first=rank, arriving="receive")


def _around(rank: int, offsets: Sequence[int], *, first: int, arriving: MoveKind) -> list[Move]:
    """Once around the ring: send the piece `first`, and in each later step the piece that came before it."""
    n = len(offsets) - 1
    after, before = (rank + 1) % n, (rank - 1) % n
    moves: list[Move] = []
    for step in range(n - 1):
        out, into = (first - step) % n, (first - step - 1) % n
        moves += moved("send", after, offsets[out], offsets[out + 1])
        moves += moved(arriving, before, offsets[into], offsets[into + 1])
    return moves
