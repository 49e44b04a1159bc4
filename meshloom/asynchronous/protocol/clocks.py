"""Bounded staleness: no live worker is more than `staleness` applied pushes ahead of the slowest.

A worker's clock is the number of its pushes that were applied. It begins another share only if it would still
be within the bound after that push is applied, so the bound holds at every moment (stale synchronous
parallel, Ho et al. 2013, who let a worker begin its step c while c - slowest <= s, and so let its clock run s
+ 1 ahead). `staleness=1` is rounds: everybody pushes once before anybody pushes again.
"""

from __future__ import annotations


class Clocks:
    """Of the live workers. staleness: the bound, 1 or more; None: there is none."""

    def __init__(self, staleness: int | None) -> None:
        self._staleness = staleness
        self._clocks: dict[int, int] = {}

    def __contains__(self, worker: int) -> bool:
        return worker in self._clocks

    def __getitem__(self, worker: int) -> int:
        return self._clocks[worker]

    @property
    def workers(self) -> list[int]:
        """Who is live."""
        return list(self._clocks)

    @property
    def gap(self) -> int:
        """Between the fastest and the slowest."""
        return max(self._clocks.values(), default=0) - min(self._clocks.values(), default=0)

    def add(self, worker: int) -> None:
        """A worker begins where the slowest is: it neither holds up others nor is held up at once."""
        self._clocks[worker] = min(self._clocks.values(), default=0)

    def remove(self, worker: int) -> None:
        """A worker that left or was lost holds up nobody."""
        del self._clocks[worker]

    def advance(self, worker: int) -> None:
        """A push was applied."""
        self._clocks[worker] += 1

    def may_begin(self, worker: int) -> bool:
        """Whether the worker stays within the bound if it pushes once more."""
        return (
            self._staleness is None
            or self._clocks[worker] + 1 - min(self._clocks.values()) <= self._staleness
        )
