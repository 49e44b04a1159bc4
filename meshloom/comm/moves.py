"""The moves of a rank in a collective: a list that is counted, drawn and run.

Each element is summed on one rank, in one order, and sent from there to the others: all have equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MoveKind = Literal["send", "add", "receive", "divide"]


@dataclass(frozen=True)
class Move:
    """An action on elements `start` to `stop` of a rank's flat tensor.

    kind: `send` them to `peer`; `add` (or reduce otherwise) what `peer` sends; `receive` them from `peer`; or
        `divide` them by the number of ranks, without a peer.
    """

    kind: MoveKind
    peer: int
    start: int
    stop: int

    def __str__(self) -> str:
        way = {"send": " to ", "add": " from ", "receive": " from "}.get(self.kind)
        return f"{self.kind} [{self.start}:{self.stop}]{f'{way}{self.peer}' if way else ''}"


@dataclass(frozen=True, kw_only=True)
class AllReduceMoves:
    """The moves of one rank in an all-reduce.

    reduce: until the sum of each element is complete on one rank.
    owned: range (start, stop) of the elements whose sums are then on this rank; it may be empty.
    gather: until every rank has all sums.
    """

    reduce: Sequence[Move]
    owned: tuple[int, int]
    gather: Sequence[Move]

    def moves(self, *, mean: bool) -> list[Move]:
        """All moves in order. mean: divide each sum once, where it is complete."""
        return [*self.reduce, *(moved("divide", -1, *self.owned) if mean else ()), *self.gather]


def moved(kind: MoveKind, peer: int, start: int, stop: int) -> list[Move]:
    """A list of one move, or of none if there are no elements.

    >>> [str(move) for move in moved("send", 2, 0, 4) + moved("send", 3, 4, 4)]
    ['send [0:4] to 2']
    """
    return [Move(kind, peer, start, stop)] if start < stop else []


def divided(start: int, stop: int, parts: int) -> list[int]:
    """The parts + 1 offsets of `parts` parts of almost equal size, larger ones first.

    >>> divided(0, 10, 4), divided(5, 7, 3)
    ([0, 3, 6, 8, 10], [5, 6, 7, 7])
    """
    size, larger = divmod(stop - start, parts)
    return [start + part * size + min(part, larger) for part in range(parts + 1)]
