"""A dict of the entries that came last."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Newest(dict[K, V]):
    """At most `limit` entries: another one takes the place of the oldest, whoever reads what. So ranks that
    put in the same forget the same.

    >>> newest = Newest(2)
    >>> newest["a"], newest["b"], newest["c"] = 1, 2, 3
    >>> list(newest)
    ['b', 'c']
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > self._limit:
            del self[next(iter(self))]
