"""Full parameters for optimizers that cannot work on shards along tp: gradients of the shards are sent to one
rank, and updated values back.

A *keeper* of a parameter holds all of it from step to step, and the optimizer's state of it:

    shards    rank 0 [ a a ]     rank 1 [ b b b ]     rank 2 [ c ]         fetch: gradients by all_to_all to the keeper, here rank 1
                        \\              |               /
    keeper                     [ a a b b b c ] -> step                     give_back: values by all_to_all to the ranks of the shards

With one keeper per parameter, state and work are spread over the ranks. Where the optimizer looks at all
parameters together, every rank keeps all of them and makes the same update of the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from meshloom.comm import pieces as moves
from meshloom.comm.pieces import Pieces
from meshloom.optimizer.sent_parts import flagged, send_parts
from meshloom.parameters.shards import Shards
from meshloom.parameters.values.building import give_memory
from meshloom.telemetry.traffic import ExpectedBytes, Traffic

_Direction = Literal["to keeper", "back"]


@dataclass(frozen=True, kw_only=True)
class GatheredParameter:
    """A sharded parameter: this rank's shard, the ranks along tp that update all of it, and, on those, all of
    it."""

    name: str
    shard: nn.Parameter
    keepers: tuple[int, ...]
    full: nn.Parameter | None


class FullFromShards:
    """How gradients of sharded parameters reach their keepers, and updated values the shards.

    entries: in the same order on all ranks of tp.
    """

    def __init__(self, entries: Sequence[GatheredParameter], shards: Shards) -> None:
        self._entries = list(entries)
        self._pieces: list[Pieces] = [shards.pieces[each.name] for each in entries]
        self._shards = shards
        self._dtypes = sorted({each.shard.dtype for each in entries}, key=str)
        self._up_to_date = False  # whether the keepers have the shards' values
        self._times_fetched = 0  # the shards' values
        for each in entries:
            if each.full is not None:
                give_memory(each.full)  # its values come with the first gradients

    def invalidate(self) -> None:
        """The shards have new values that no update made: the keepers fetch them again."""
        self._up_to_date = False

    def fetch(self) -> None:
        """Set `.grad` of every parameter that this rank keeps to its shards' gradients, assembled; None if no
        rank has one."""
        if not self._up_to_date:
            values = self._assemble([each.shard.detach() for each in self._entries])
            for each, value in zip(self._entries, values, strict=True):
                if each.full is not None and value is not None:
                    each.full.data.copy_(value)
            self._up_to_date = True
            self._times_fetched += 1
        gradients = self._assemble([each.shard.grad for each in self._entries])
        for each, gradient in zip(self._entries, gradients, strict=True):
            if each.full is not None:
                each.full.grad = gradient

    def give_back(self) -> None:
        """Write the keepers' new values into the shards."""

        def shard(number: int, rank: int) -> Tensor:
            full = self._entries[number].full
            assert full is not None
            return moves.take(self._pieces[number], rank, full.detach())

        received = self._exchange("back", lambda number, rank: shard(number, rank).reshape(-1))
        for number, each in enumerate(self._entries):
            mine = (
                shard(number, self._shards.rank)
                if each.full is not None
                else received[number, each.keepers[0]].view(each.shard.shape)
            )
            each.shard.data.copy_(mine)

    def expected_bytes(self) -> ExpectedBytes:
        """Bytes that this rank hands over along tp: gradients and values in every step; so far, the values
        that keepers had to fetch."""
        there, back = self._bytes("to keeper"), self._bytes("back")
        return ExpectedBytes(
            per_step=Traffic.along("tp", all_to_all=there + back),
            so_far=Traffic.along("tp", all_to_all=there * self._times_fetched),
        )

    def _assemble(self, shards: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Of each entry, the full tensor of all ranks' shards; None where this rank does not keep it or all
        shards are None.

        Before every shard a flag is sent: 1 there, 0 not.
        """
        received = self._exchange("to keeper", lambda number, _: self._flagged(number, shards[number]))
        full: list[Tensor | None] = []
        for number, pieces in enumerate(self._pieces):
            flagged = [
                received[number, rank] for rank in range(self._shards.size) if (number, rank) in received
            ]
            known = bool(flagged) and shards[number] is not None  # else they are read
            is_there = known or any(bool(each[0]) for each in flagged)
            full.append(
                moves.assemble(
                    pieces, [each[1:].view(pieces.local_shape(rank)) for rank, each in enumerate(flagged)]
                )
                if is_there
                else None
            )
        return full

    def _exchange(
        self, direction: _Direction, payload: Callable[[int, int], Tensor]
    ) -> dict[tuple[int, int], Tensor]:
        """Send `payload(entry, to)` of every entry that is sent in this direction; what arrives here, flat,
        by entry and sender."""
        group, device = (
            self._shards.group,
            next((each.shard.device for each in self._entries), torch.device("cpu")),
        )
        assert group is not None
        going, length = partial(self._going, direction), partial(self._length, direction)
        arrived = send_parts(group, self._dtypes, device, going, length, payload)
        return {(number, source): values for number, source, values in arrived}

    def _flagged(self, number: int, part: Tensor | None) -> Tensor:
        shard = self._entries[number].shard
        return flagged(part, shard.numel(), shard)

    def _going(self, direction: _Direction, source: int, to: int, dtype: torch.dtype) -> list[int]:
        """Entries that one rank sends to another, in order."""
        entries = [
            (number, each.keepers) for number, each in enumerate(self._entries) if each.shard.dtype == dtype
        ]
        if direction == "to keeper":
            return [number for number, keepers in entries if to in keepers]
        return [number for number, keepers in entries if source == keepers[0] and to not in keepers]

    def _length(self, direction: _Direction, number: int, source: int, to: int) -> int:
        pieces = self._pieces[number]
        return pieces.num_elements(source) + 1 if direction == "to keeper" else pieces.num_elements(to)

    def _bytes(self, direction: _Direction) -> int:
        here = self._shards.rank
        return sum(
            self._length(direction, number, here, to) * dtype.itemsize
            for dtype in self._dtypes for to in range(self._shards.size) for number in self._going(direction, here, to, dtype)
        )  # fmt: skip
