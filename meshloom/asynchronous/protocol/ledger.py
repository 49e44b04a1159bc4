"""The ledger of the data: each share is assigned, and comes back done or to be assigned again.

Shares are numbered 0, 1, 2, ... over all epochs. A share's number determines its samples.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Any


class Ledger:
    """next_share: the first that was never assigned. free: earlier ones that have to be assigned again."""

    def __init__(self, next_share: int = 0, free: Iterable[int] = ()) -> None:
        self._next = next_share
        self._free = sorted(free)
        self._out: set[int] = set()

    def take(self) -> int:
        """A share to compute: the oldest free one, or the next."""
        if self._free:
            share = heapq.heappop(self._free)
        else:
            share = self._next
            self._next += 1
        self._out.add(share)
        return share

    def finish(self, share: int) -> None:
        """The share's gradient was applied."""
        self._out.remove(share)

    def give_back(self, share: int) -> None:
        """The share's worker will not finish it."""
        self._out.remove(share)
        heapq.heappush(self._free, share)

    def state(self) -> dict[str, Any]:
        """JSON values. Shares that are out count as free: their workers are unknown when this is read."""
        return {"next_share": self._next, "free": sorted([*self._free, *self._out])}

    @staticmethod
    def of(state: Mapping[str, Any]) -> Ledger:
        """From what `state` gave."""
        return Ledger(state["next_share"], state["free"])
