"""All-reduce by recursive halving and doubling.

In each step, partners at half the distance exchange half as much; then the reverse.

N = 4, pieces a b c d:

    distance 2   0 <-> 2  ab for cd        1 <-> 3  ab for cd         0 has the sums of two in a b, 2 in c d
    distance 1   0 <-> 1  a for b          2 <-> 3  c for d           0 has a, 1 has b, 2 has c, 3 has d
    then the same steps in reverse, sending sums

2 log2 N steps move 2(N-1)/N of the elements (Rabenseifner; Thakur et al., 2005). With P < N < 2P ranks, P a
power of two, the first N - P pairs are folded: the second rank of a pair sends all its elements to the first,
which takes part for both.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshloom.comm.moves import AllReduceMoves, Move, divided, moved


def halving(rank: int, size: int, num_elements: int) -> AllReduceMoves:
    """The all-reduce moves of `rank` among `size` ranks.

    >>> [str(move) for move in halving(1, 2, 8).moves(mean=False)]
    ['send [0:4] to 0', 'add [4:8] from 0', 'send [4:8] to 0', 'receive [0:4] from 0']
    """
    power, folded = _folding(size)
    offsets = divided(0, num_elements, power)
    place = _place(rank, folded)
    if place is None:
        return AllReduceMoves(
            reduce=moved("send", rank - 1, 0, num_elements),
            owned=(0, 0),
            gather=moved("receive", rank - 1, 0, num_elements),
        )
    other = rank + 1 if place < folded else None
    reduce = moved("add", other, 0, num_elements) if other else []
    gather = moved("send", other, 0, num_elements) if other else []
    return AllReduceMoves(
        reduce=reduce + _halve(place, power, folded, offsets),
        owned=(offsets[place], offsets[place + 1]),
        gather=_double(place, power, folded, offsets) + gather,
    )


def halving_reduce_scatter(rank: int, size: int, num_elements: int) -> list[Move]:
    """The moves of `rank` after which each rank r has the sums of the r-th of `size` equal pieces."""
    power, folded = _folding(size)
    piece = num_elements // size
    place = _place(rank, folded)
    if place is None:
        return moved("send", rank - 1, 0, num_elements) + moved(
            "receive", rank - 1, rank * piece, (rank + 1) * piece
        )
    folds = place < folded
    offsets = [piece * first for first in _firsts(power, folded)]
    return [
        *(moved("add", rank + 1, 0, num_elements) if folds else ()),
        *_halve(place, power, folded, offsets),
        *(moved("send", rank + 1, (rank + 1) * piece, (rank + 2) * piece) if folds else ()),
    ]


def doubling_all_gather(rank: int, size: int, num_elements: int) -> list[Move]:
    """The moves of `rank` after which every rank has all pieces, of which rank r had the r-th of `size`."""
    power, folded = _folding(size)
    piece = num_elements // size
    place = _place(rank, folded)
    if place is None:
        return [
            *moved("send", rank - 1, rank * piece, (rank + 1) * piece),
            *moved("receive", rank - 1, 0, rank * piece),
            *moved("receive", rank - 1, (rank + 1) * piece, num_elements),
        ]
    folds = place < folded
    offsets = [piece * first for first in _firsts(power, folded)]
    return [
        *(moved("receive", rank + 1, (rank + 1) * piece, (rank + 2) * piece) if folds else ()),
        *_double(place, power, folded, offsets),
        *(moved("send", rank + 1, 0, (rank + 1) * piece) if folds else ()),
        *(moved("send", rank + 1, (rank + 2) * piece, num_elements) if folds else ()),
    ]


def _folding(size: int) -> tuple[int, int]:
    """The largest power of two up to `size`, and the number of remaining ranks.

    >>> _folding(8), _folding(7)
    ((8, 0), (4, 3))
    """
    power = 1 << (size.bit_length() - 1)
    return power, size - power


def _place(rank: int, folded: int) -> int | None:
    """This rank's index among those that halve; None for the second rank of a pair.

    >>> [_place(rank, 2) for rank in range(6)]
    [0, None, 1, None, 2, 3]
    """
    if rank >= 2 * folded:
        return rank - folded
    return None if rank % 2 else rank // 2


def _rank(place: int, folded: int) -> int:
    return 2 * place if place < folded else place + folded


def _firsts(power: int, folded: int) -> list[int]:
    """The first rank at each index, and the number of ranks."""
    return [_rank(place, folded) for place in range(power)] + [power + folded]


def _halve(place: int, power: int, folded: int, offsets: Sequence[int]) -> list[Move]:
    moves: list[Move] = []
    low, distance = 0, power // 2  # this rank still reduces pieces low to low + 2 * distance
    while distance:
        partner = _rank(place ^ distance, folded)
        upper = place & distance
        keep, send = (low + distance, low) if upper else (low, low + distance)
        moves += moved("send", partner, offsets[send], offsets[send + distance])
        moves += moved("add", partner, offsets[keep], offsets[keep + distance])
        low, distance = keep, distance // 2
    return moves


def _double(place: int, power: int, folded: int, offsets: Sequence[int]) -> list[Move]:
    moves: list[Move] = []
    low, distance = place, 1  # this rank has pieces low to low + distance
    while distance < power:
        partner = _rank(place ^ distance, folded)
        theirs = low ^ distance
        moves += moved("send", partner, offsets[low], offsets[low + distance])
        moves += moved("receive", partner, offsets[theirs], offsets[theirs + distance])
        low, distance = min(low, theirs), distance * 2
    return moves
