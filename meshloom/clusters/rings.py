"""Rings and trees that fit into the links of a host side by side, each using a link at most once in each direction.

0 -- 1      three GPUs with links 0-1, 0-2 and twice 1-2: two rings, one each way round, and two trees, 0-1-2 and 0-2-1
|   //
|  //
 2
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import permutations

Links = tuple[tuple[int, int, int], ...]  # (gpu, gpu, how many)


@cache
def num_rings(links: Links, gpus: tuple[int, ...]) -> int:
    """Return how many rings through all of `gpus` have links of their own, each link being two, one per direction.

    >>> num_rings(((0, 1, 1), (0, 2, 1), (1, 2, 2)), (0, 1, 2)), num_rings(((0, 1, 3),), (0, 1)), num_rings(((0, 1, 1),), (0, 1, 2))
    (2, 3, 0)
    """
    count = _count(links, gpus)
    if len(gpus) == 2:
        return count[gpus]
    return 2 * _most_cycles(count, [cycle for cycle in _cycles(gpus) if not cycle - count])


@cache
def num_trees(links: Links, gpus: tuple[int, ...]) -> int:
    """Return how many trees that span `gpus` have links of their own.

    The least, over all divisions of the GPUs into groups, of the links between groups over the groups less one
    (Nash-Williams, 1961; Tutte, 1961).

    >>> num_trees(((0, 1, 1), (0, 2, 1), (1, 2, 2)), (0, 1, 2))
    2
    """
    count = _count(links, gpus)
    return min(
        sum(many for (one, other), many in count.items() if group[one] != group[other]) // max(group.values())
        for group in _groupings(gpus)
        if max(group.values())
    )


def _count(links: Links, gpus: tuple[int, ...]) -> Counter[tuple[int, int]]:
    count = Counter[tuple[int, int]]()
    for one, other, many in links:
        if one in gpus and other in gpus:
            count[_edge(one, other)] += many
    return count


def _edge(one: int, other: int) -> tuple[int, int]:
    return (one, other) if one < other else (other, one)


def _cycles(gpus: tuple[int, ...]) -> Iterator[Counter[tuple[int, int]]]:
    """The links of each cycle through all GPUs, whichever way round."""
    first, *others = gpus
    for order in permutations(others):
        if order[0] < order[-1]:
            yield Counter(
                _edge(one, other) for one, other in zip((first, *order), (*order, first), strict=True)
            )


def _most_cycles(count: Counter[tuple[int, int]], cycles: list[Counter[tuple[int, int]]]) -> int:
    """How many of `cycles`, any of them more than once, the links allow together."""
    most = 0
    for number, cycle in enumerate(cycles):
        left = count - cycle
        most = max(most, 1 + _most_cycles(left, [each for each in cycles[number:] if not each - left]))
    return most


def _groupings(gpus: tuple[int, ...]) -> Iterator[dict[int, int]]:
    """All divisions into groups, as the number of each GPU's group."""
    if not gpus:
        yield {}
        return
    *before, last = gpus
    for group in _groupings(tuple(before)):
        for number in range(max(group.values(), default=-1) + 2):
            yield {**group, last: number}
