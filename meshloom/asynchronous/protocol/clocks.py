"""Bounded staleness: no live worker is more than `staleness` applied pushes ahead of the slowest.

A worker's clock is the number of its pushes that were applied. It begins another share only if it would still
be within the bound after that push, so the bound holds at every moment (stale synchronous parallel, Ho et al.
2013, who let a worker begin its step c while c - slowest <= s, so that its clock may run s + 1 ahead).
`staleness=1` means rounds: every worker pushes once before any pushes again.
"""

from __future__ import annotations


class Clocks:
    """The clocks of the live workers. staleness: the bound, 1 or more; None: no bound."""

    def __init__(self, staleness: int | None) -> None:
        self._staleness = staleness
        self._clocks: dict[int, int] = {}

    def __contains__(self, worker: int) -> bool:
        return worker in self._clocks

    def __getitem__(self, worker: int) -> int:
        return self._clocks[worker]

    @property
    def workers(self) -> list[int]:
        """The live workers."""
        return list(self._clocks)

    @property
    def gap(self) -> int:
        """The difference between the fastest and the slowest."""
        return max(self._clocks.values(), default=0) - min(self._clocks.values(), default=0)

    def add(self, worker: int) -> None:
        """A new worker begins at the clock of the slowest: it delays nobody and need not wait."""
        self._clocks[worker] = min(self._clocks.values(), default=0)

    def remove(self, worker: int) -> None:
        """A worker left or was lost; nobody waits for it."""
        del self._clocks[worker]

    def advance(self, worker: int) -> None:
        """A push was applied."""
        self._clocks[worker] += 1

    def may_begin(self, worker: int) -> bool:
        """Whether the worker stays within the bound if it pushes once more."""
        ahead = self._clocks[worker] + 1 - min(self._clocks.values())
        return self._staleness is None or ahead <= self._staleness
