"""Carries out a list of moves in chunks, so that sending, receiving and adding overlap.

Of a piece of three chunks, in a ring (`>` a chunk is sent, `+` the one that came is added):

    step 0    > > >
              + + +
    step 1      > > >       the first chunk goes on as soon as it is added, while the second is still arriving
                + + +

What is to be received is asked for a few chunks ahead, so that the sender never waits to be asked. Writing
into a tensor that is still being sent cannot happen: what arrives for elements that this rank has sent was
made from what it sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshloom.comm.group import Group, ReduceOp, Work
from meshloom.comm.moves import Move

CHUNK_BYTES = 2**20  # docs/rings.md has what others take
_AHEAD = 8  # chunks that are asked for before they are needed

# an operation that goes on; it yields each work that it needs to be over, and is resumed when it was waited
# for
Waits = Generator[Work, None, None]


def in_chunks(moves: Sequence[Move], chunk: int) -> list[Move]:
    """The same moves in pieces of at most `chunk` elements, in an order that can be followed one after
    another: a send stands where what it sends is there.

    Messages between two ranks keep their order, and so do the chunks that arrive.

    >>> [str(move) for move in in_chunks([Move("add", 1, 0, 4), Move("send", 2, 0, 4)], 2)]
    ['add [0:2] from 1', 'send [0:2] to 2', 'add [2:4] from 1', 'send [2:4] to 2']
    """
    arriving: list[Move] = []
    slots: list[list[Move]] = [[]]  # [i]: what follows the first i chunks that arrive
    written: list[_Written] = []
    newest: dict[int, int] = {}  # slot of the newest send to each peer
    for move in moves:
        changed = _Written(move.start, move.stop, chunk)
        for start in range(move.start, move.stop, chunk):
            piece = Move(move.kind, move.peer, start, min(start + chunk, move.stop))
            if move.kind in ("add", "receive"):
                arriving.append(piece)
                slots.append([])
                changed.slots.append(len(arriving))
                continue
            slot = max(
                (each.slot(piece) for each in written if each.start < piece.stop and piece.start < each.stop),
                default=0,
            )
            if move.kind == "send":
                slot = newest[move.peer] = max(slot, newest.get(move.peer, 0))
            else:
                changed.slots.append(slot)
            slots[slot].append(piece)
        if changed.slots:
            written.append(changed)
    return [
        *slots[0],
        *(each for piece, then in zip(arriving, slots[1:], strict=True) for each in (piece, *then)),
    ]


def carry_out(group: Group, chunks: Sequence[Move], flat: Tensor, op: ReduceOp) -> Waits:
    """Do what `in_chunks` gave with `flat` (1-d), by `send` and `recv` of `group`.

    op: how what arrives is added; avg is a sum, as the division is a move of its own.
    """
    expected = iter([move for move in chunks if move.kind in ("add", "receive")])
    longest = max((move.stop - move.start for move in chunks), default=0)
    scratch = torch.empty(_AHEAD, longest, dtype=flat.dtype, device=flat.device)
    num_asked = 0
    asked: deque[tuple[Work, Tensor]] = deque()
    sent: list[Work] = []

    def ask(move: Move | None) -> None:
        nonlocal num_asked
        if move is not None:
            # free again: chunks are taken in the order in which they were asked for
            row = scratch[num_asked % _AHEAD]
            into = row[: move.stop - move.start] if move.kind == "add" else flat[move.start : move.stop]
            asked.append((group.recv(into, move.peer), into))
            num_asked += 1

    for _ in range(_AHEAD):
        ask(next(expected, None))
    for move in chunks:
        mine = flat[move.start : move.stop]
        if move.kind == "send":
            sent.append(group.send(mine, move.peer))
        elif move.kind == "divide":
            mine.copy_(mine / group.size)
        else:
            work, arrived = asked.popleft()
            yield work
            if move.kind == "add":
                combine(mine, arrived, op)
            ask(next(expected, None))
    for work in sent:
        yield work


def combine(total: Tensor, other: Tensor, op: ReduceOp) -> None:
    """Take `other` into `total`, elementwise. Raises what torch raises for a dtype that cannot be so
    combined."""
    if op == "max":
        torch.maximum(total, other, out=total)
    elif op == "min":
        torch.minimum(total, other, out=total)
    else:
        total.add_(other)


@dataclass(frozen=True)
class _Written:
    """Elements that a move changes, chunk by chunk. slots: after how many arrived chunks each is done."""

    start: int
    stop: int
    chunk: int
    slots: list[int] = field(default_factory=list[int])

    def slot(self, piece: Move) -> int:
        """After how many arrived chunks all of `piece` that this move changes is changed."""
        first = (max(piece.start, self.start) - self.start) // self.chunk
        last = (min(piece.stop, self.stop) - 1 - self.start) // self.chunk
        return max(self.slots[first : last + 1])
