"""What a rank sends and receives in a collective, as a list: the same list is counted, drawn and carried out.

Every element is summed up on one rank, in one order, and goes from there to the others, so that all ranks
hold the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["send", "add", "receive", "divide"]


@dataclass(frozen=True)
class Move:
    """One thing that a rank does with elements `start` to `stop` of its flat tensor.

    kind: send them to `peer`, add what `peer` sends to them (or take the larger, the smaller), receive them
        from `peer`, or divide them by the number of ranks, which has no peer.
    """

    kind: Kind
    peer: int
    start: int
    stop: int

    def __str__(self) -> str:
        peer = {"send": f" to {self.peer}", "add": f" from {self.peer}", "receive": f" from {self.peer}"}.get(
            self.kind, ""
        )
        return f"{self.kind} [{self.start}:{self.stop}]{peer}"


@dataclass(frozen=True, kw_only=True)
class AllReduceMoves:
    """A rank's part in an all-reduce.

    reduce: until every element's sum is on one rank. owned: the elements (start, stop) whose sums this rank
    then has; none if they are equal. gather: until every rank has all of them.
    """

    reduce: Sequence[Move]
    owned: tuple[int, int]
    gather: Sequence[Move]

    def moves(self, *, mean: bool) -> list[Move]:
        """All, in order; sums are divided where they are made, once."""
        return [*self.reduce, *(moved("divide", -1, *self.owned) if mean else ()), *self.gather]


def moved(kind: Kind, peer: int, start: int, stop: int) -> list[Move]:
    """One move, or none where there is nothing to move.

    >>> [str(move) for move in moved("send", 2, 0, 4) + moved("send", 3, 4, 4)]
    ['send [0:4] to 2']
    """
    return [Move(kind, peer, start, stop)] if start < stop else []


def divided(start: int, stop: int, parts: int) -> list[int]:
    """Where `parts` parts of almost equal size begin, and the end: parts + 1 offsets. Larger ones come first.

    >>> divided(0, 10, 4), divided(5, 7, 3)
    ([0, 3, 6, 8, 10], [5, 6, 7, 7])
    """
    size, larger = divmod(stop - start, parts)
    return [start + part * size + min(part, larger) for part in range(parts + 1)]
