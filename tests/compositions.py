"""All ways to divide a number over places: what decisions about shares are held against."""

from __future__ import annotations

from collections.abc import Iterator


def compositions(total: int, parts: int, least: int = 0) -> Iterator[tuple[int, ...]]:
    """Tuples of `parts` whole numbers, each `least` or more, that sum to `total`.

    >>> list(compositions(2, 2)), list(compositions(3, 2, least=1))
    ([(0, 2), (1, 1), (2, 0)], [(1, 2), (2, 1)])
    """
    if parts == 1:
        yield (total,)
        return
    for first in range(least, total - least * (parts - 1) + 1):
        for rest in compositions(total - first, parts - 1, least):
            yield first, *rest
