"""A dict of bounded size."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class FifoCache(dict[K, V]):
    """A dict of at most `limit` entries: a new one evicts the oldest, regardless of reads. So ranks that
    insert the same entries evict the same.

    >>> cache = FifoCache(2)
    >>> cache["a"], cache["b"], cache["c"] = 1, 2, 3
    >>> list(cache)
    ['b', 'c']
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > self._limit:
            del self[next(iter(self))]
