"""Runs a list of moves in chunks, so that sending, receiving and adding overlap.

A piece of three chunks in a ring (`>` a chunk is sent, `+` the received one is added):

    step 0    > > >
              + + +
    step 1      > > >       the first chunk is sent as soon as it is added, while the second is still received
                + + +

Receives are posted a few chunks ahead, so that a sender never waits for one. A tensor that is still being
sent is never overwritten: what arrives for elements that this rank has sent was computed from what it sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshloom.comm.group import Group, ReduceOp, Work
from meshloom.comm.moves import Move
from meshloom.comm.reductions import combine, divide

CHUNK_BYTES = 2**20  # benchmarks/rings has what others take
_AHEAD = 8  # receives that are posted before they are needed

# an operation of several messages: it yields each work that must have finished before it can continue
Waits = Generator[Work, None, None]


def in_chunks(moves: Sequence[Move], chunk: int) -> list[Move]:
    """The same moves in pieces of at most `chunk` elements, in an order that can be run one by one: each send
    comes after what it sends is complete.

    Messages between two ranks keep their order, and so do the chunks that are received.

    >>> [str(move) for move in in_chunks([Move("add", 1, 0, 4), Move("send", 2, 0, 4)], 2)]
    ['add [0:2] from 1', 'send [0:2] to 2', 'add [2:4] from 1', 'send [2:4] to 2']
    """
    received: list[Move] = []
    slots: list[list[Move]] = [[]]  # [i]: moves that follow the i-th received chunk
    written: list[_Written] = []
    newest: dict[int, int] = {}  # slot of the newest send to each peer
    for move in moves:
        writes = _Written(move.start, move.stop, chunk)
        for start in range(move.start, move.stop, chunk):
            piece = Move(move.kind, move.peer, start, min(start + chunk, move.stop))
            if move.kind in ("add", "receive"):
                received.append(piece)
                slots.append([])
                writes.slots.append(len(received))
                continue
            slot = max(
                (each.slot(piece) for each in written if each.start < piece.stop and piece.start < each.stop),
                default=0,
            )
            if move.kind == "send":
                slot = newest[move.peer] = max(slot, newest.get(move.peer, 0))
            else:
                writes.slots.append(slot)
            slots[slot].append(piece)
        if writes.slots:
            written.append(writes)
    return [
        *slots[0],
        *(each for piece, then in zip(received, slots[1:], strict=True) for each in (piece, *then)),
    ]


def run_moves(group: Group, chunks: Sequence[Move], flat: Tensor, op: ReduceOp) -> Waits:
    """Run the moves of `in_chunks` on `flat` [n], by `send` and `recv` of `group`.

    op: the reduction of what is received; an average is a sum, since its division is a move of its own.
    """
    expected = iter([move for move in chunks if move.kind in ("add", "receive")])
    longest = max((move.stop - move.start for move in chunks), default=0)
    scratch = torch.empty(_AHEAD, longest, dtype=flat.dtype, device=flat.device)
    num_posted = 0
    posted: deque[tuple[Work, Tensor]] = deque()
    sent: list[Work] = []

    def post(move: Move | None) -> None:
        nonlocal num_posted
        if move is not None:
            # free again: chunks are used in the order in which they were posted
            row = scratch[num_posted % _AHEAD]
            into = row[: move.stop - move.start] if move.kind == "add" else flat[move.start : move.stop]
            posted.append((group.recv(into, move.peer), into))
            num_posted += 1

    for _ in range(_AHEAD):
        post(next(expected, None))
    for move in chunks:
        mine = flat[move.start : move.stop]
        if move.kind == "send":
            sent.append(group.send(mine, move.peer))
        elif move.kind == "divide":
            divide(mine, group.size)
        else:
            work, arrived = posted.popleft()
            yield work
            if move.kind == "add":
                combine(mine, arrived, op)
            post(next(expected, None))
    for work in sent:
        yield work


@dataclass(frozen=True)
class _Written:
    """Elements that a move writes, chunk by chunk, each after as many received chunks as `slots` says."""

    start: int
    stop: int
    chunk: int
    slots: list[int] = field(default_factory=list[int])

    def slot(self, piece: Move) -> int:
        """The number of received chunks after which this move has written all of its part of `piece`."""
        first = (max(piece.start, self.start) - self.start) // self.chunk
        last = (min(piece.stop, self.stop) - 1 - self.start) // self.chunk
        return max(self.slots[first : last + 1])
