"""Whole parameters for optimizers that cannot work on parts: gradients of all tp ranks come together, updated
values go back as parts.

A *keeper* of a parameter has all of it, lasting from step to step, and the optimizer's state of it:

    parts     rank 0 [ a a ]     rank 1 [ b b b ]     rank 2 [ c ]         fetch: gradients by all_to_all to the keeper, here rank 1
                        \\              |               /
    keeper                     [ a a b b b c ] -> step                     give_back: values by all_to_all to the holders of the parts

One keeper per parameter divides state and work. Where the optimizer looks at all parameters at once every
rank keeps all, and all of them make the same update of the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from meshloom.comm import pieces as moves
from meshloom.comm.group import Work
from meshloom.comm.pieces import Pieces
from meshloom.comm.steps import Steps
from meshloom.parameters.shards import Shards
from meshloom.telemetry.traffic import ExpectedBytes, Traffic

_Way = Literal["to keeper", "back"]


@dataclass(frozen=True, kw_only=True)
class GatheredParameter:
    """A divided parameter: this rank's part, the ranks of tp that update all of it, and all of it on
    those."""

    name: str
    part: nn.Parameter
    keepers: tuple[int, ...]
    whole: nn.Parameter | None


class WholeFromParts:
    """How gradients of divided parameters reach their keepers, and updated values the parts.

    entries: in the same order on all ranks of tp.
    """

    def __init__(self, entries: Sequence[GatheredParameter], shards: Shards) -> None:
        self._entries = list(entries)
        self._pieces: list[Pieces] = [shards.pieces[each.name] for each in entries]
        self._shards = shards
        self._dtypes = sorted({each.part.dtype for each in entries}, key=str)
        self._known = False  # whether the keepers have the parameters' values
        self._times_fetched = 0  # those values

    def forget(self) -> None:
        """The parts have new values that no update made: the keepers fetch them anew."""
        self._known = False

    def fetch(self) -> Steps[None]:
        """Set `.grad` of every whole parameter that this rank keeps to what the parts' gradients make; None
        if no rank has one."""
        if not self._known:
            values = yield from self._bring([each.part.detach() for each in self._entries])
            for each, value in zip(self._entries, values, strict=True):
                if each.whole is not None and value is not None:
                    each.whole.data.copy_(value)
            self._known = True
            self._times_fetched += 1
        gradients = yield from self._bring([each.part.grad for each in self._entries])
        for each, gradient in zip(self._entries, gradients, strict=True):
            if each.whole is not None:
                each.whole.grad = gradient

    def give_back(self) -> Steps[None]:
        """Write the keepers' new values into the parts."""

        def part(number: int, rank: int) -> Tensor:
            whole = self._entries[number].whole
            assert whole is not None
            return moves.take(self._pieces[number], rank, whole.detach())

        received = yield from self._swap("back", lambda number, rank: part(number, rank).reshape(-1))
        for number, each in enumerate(self._entries):
            mine = (
                part(number, self._shards.rank)
                if each.whole is not None
                else received[number, each.keepers[0]].view(each.part.shape)
            )
            each.part.data.copy_(mine)

    def expected_bytes(self) -> ExpectedBytes:
        """Bytes that this rank hands over along tp: gradients and values in every step; so far, the values
        that keepers did not know."""
        there, back = self._bytes("to keeper"), self._bytes("back")
        return ExpectedBytes(
            per_step=Traffic.along("tp", all_to_all=there + back),
            so_far=Traffic.along("tp", all_to_all=there * self._times_fetched),
        )

    def _bring(self, parts: Sequence[Tensor | None]) -> Steps[list[Tensor | None]]:
        """Of each entry, the whole tensor of all ranks' parts; None where this rank does not keep it or all
        parts are None.

        A number travels ahead of every part: 1 there, 0 not.
        """
        received = yield from self._swap(
            "to keeper", lambda number, _: _flagged(parts[number], self._entries[number].part)
        )
        made: list[Tensor | None] = []
        for number, pieces in enumerate(self._pieces):
            flagged = [
                received[number, rank] for rank in range(self._shards.size) if (number, rank) in received
            ]
            is_there = any(bool(each[0]) for each in flagged)
            made.append(
                moves.assemble(
                    pieces, [each[1:].view(pieces.local_shape(rank)) for rank, each in enumerate(flagged)]
                )
                if is_there
                else None
            )
        return made

    def _swap(self, way: _Way, payload: Callable[[int, int], Tensor]) -> Steps[dict[tuple[int, int], Tensor]]:
        """Send `payload(entry, to)` of every entry that goes that way; what comes here, flat, by entry and
        sender. One all_to_all per dtype."""
        group, here, ranks = self._shards.group, self._shards.rank, range(self._shards.size)
        assert group is not None
        works: list[Work] = []
        flats: list[Tensor] = []
        for dtype in self._dtypes:
            sent = [payload(number, to) for to in ranks for number in self._going(way, here, to, dtype)]
            sizes = [
                sum(self._length(way, number, here, to) for number in self._going(way, here, to, dtype))
                for to in ranks
            ]
            expected = [
                sum(
                    self._length(way, number, source, here)
                    for number in self._going(way, source, here, dtype)
                )
                for source in ranks
            ]
            flats.append(torch.empty(sum(expected), dtype=dtype, device=self._entries[0].part.device))
            works.append(
                group.all_to_all(
                    flats[-1], torch.cat(sent) if sent else flats[-1].new_empty(0), expected, sizes
                )
            )
        yield
        for work in works:
            work.wait()
        received: dict[tuple[int, int], Tensor] = {}
        for dtype, flat in zip(self._dtypes, flats, strict=True):
            at = 0
            for source in ranks:
                for number in self._going(way, source, here, dtype):
                    length = self._length(way, number, source, here)
                    received[number, source] = flat[at : at + length]
                    at += length
        return received

    def _going(self, way: _Way, source: int, to: int, dtype: torch.dtype) -> list[int]:
        """Entries that travel from one rank to another, in order."""
        entries = [
            (number, each.keepers) for number, each in enumerate(self._entries) if each.part.dtype == dtype
        ]
        if way == "to keeper":
            return [number for number, keepers in entries if to in keepers]
        return [number for number, keepers in entries if source == keepers[0] and to not in keepers]

    def _length(self, way: _Way, number: int, source: int, to: int) -> int:
        pieces = self._pieces[number]
        return pieces.num_elements(source) + 1 if way == "to keeper" else pieces.num_elements(to)

    def _bytes(self, way: _Way) -> int:
        here = self._shards.rank
        return sum(
            self._length(way, number, here, to) * dtype.itemsize
            for dtype in self._dtypes for to in range(self._shards.size) for number in self._going(way, here, to, dtype)
        )  # fmt: skip


def _flagged(part: Tensor | None, like: nn.Parameter) -> Tensor:
    flagged = torch.zeros(like.numel() + 1, dtype=like.dtype, device=like.device)
    if part is not None:
        flagged[0] = 1
        flagged[1:] = part.reshape(-1)
    return flagged
