"""The moves of a rank in a collective: a list that is counted, drawn and run.

Each element is summed on one rank, in one order, and sent from there to the others: all have equal bits.
"""

from __future__ import annotations

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


def moved(kind: MoveKind, peer: int, start: int, stop: int) -> list[Move]:
    """A list of one move, or of none if there are no elements.

    >>> [str(move) for move in moved("send", 2, 0, 4) + moved("send", 3, 4, 4)]
    ['send [0:4] to 2']
    """
    return [Move(kind, peer, start, stop)] if start < stop else []


def piece_offsets(num_elements: int, num_pieces: int) -> list[int]:
    """The offsets of so many pieces of almost equal size, larger ones first, and the end.

    >>> piece_offsets(10, 4), piece_offsets(2, 3)
    ([0, 3, 6, 8, 10], [0, 1, 2, 2])
    """
    size, larger = divmod(num_elements, num_pieces)
    return [piece * size + min(piece, larger) for piece in range(num_pieces + 1)]
