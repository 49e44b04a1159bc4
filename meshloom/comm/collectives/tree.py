"""All-reduce on a binomial tree: a reduction to rank 0, then a broadcast from it.

N = 6, distances 1, 2, 4 to rank 0; the broadcast is the reverse:

    1 -> 0   3 -> 2   5 -> 4
    2 -> 0
    4 -> 0

2 log2 N messages one after another, each of all elements (Thakur et al., "Optimization of collective
communication operations in MPICH", 2005). All ranks send 2(N-1) messages, the minimum; halving, N log2 N.
"""

from __future__ import annotations

from meshloom.comm.moves import AllReduceMoves, Move, moved


def tree(rank: int, size: int, num_elements: int) -> AllReduceMoves:
    """The all-reduce moves of `rank` in a tree with rank 0 at its root.

    >>> [str(move) for move in tree(2, 4, 5).moves(mean=False)]
    ['add [0:5] from 3', 'send [0:5] to 0', 'receive [0:5] from 0', 'send [0:5] to 3']
    """
    parent, children = _family(rank, size)
    reduce = [move for child in children for move in moved("add", child, 0, num_elements)]
    if parent is not None:
        reduce += moved("send", parent, 0, num_elements)
    owned = (0, num_elements) if parent is None else (0, 0)
    return AllReduceMoves(reduce=reduce, owned=owned, gather=tree_broadcast(rank, size, num_elements, 0))


def tree_broadcast(rank: int, size: int, num_elements: int, source: int) -> list[Move]:
    """The broadcast moves of `rank` in a tree with `source` at its root: log2 N messages in turn."""
    parent, children = _family((rank - source) % size, size)
    moves = [] if parent is None else moved("receive", (parent + source) % size, 0, num_elements)
    for child in reversed(children):  # the largest subtree first
        moves += moved("send", (child + source) % size, 0, num_elements)
    return moves


def _family(number: int, size: int) -> tuple[int | None, list[int]]:
    """Parent and children (the nearest first) of a number in a binomial tree with 0 at its root.

    >>> _family(0, 6), _family(4, 6)
    ((None, [1, 2, 4]), (0, [5]))
    """
    children: list[int] = []
    distance = 1
    while distance < size:
        if number & distance:
            return number - distance, children
        if number + distance < size:
            children.append(number + distance)
        distance *= 2
    return None, children
