"""Full parameters for optimizers that cannot work on slices along dp: their gradients are sent to one rank,
and updated values back.

Every element of a parameter has one owner, which holds its averaged gradient. A *keeper* of a parameter
updates all of it:

    owners     rank 0 [ g g ]   rank 1 [ g g g ]   rank 2 [ g ]          fetch: all_to_all to the keeper, here rank 1
                          \\           |            /
    keeper                   [ g g g g g g ] -> step                     give_back: all_to_all to the owners

With one keeper per parameter, state and work are spread over the ranks. Where the optimizer looks at all
parameters together, every rank keeps all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.exchange.exchange import Memory, Slice
from meshloom.optimizer.sent_parts import flagged, send_parts
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class _Part(NamedTuple):
    """Elements `start` to `stop` of parameter number `parameter`, which one rank owns."""

    parameter: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def assign_evenly(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """A rank for each size, such that the sums are about equal: the largest first, each to the rank with the
    smallest sum so far.

    >>> assign_evenly([5, 9, 4], 2)
    [1, 0, 1]
    """
    loads = [0] * num_ranks
    ranks = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        ranks[index] = min(range(num_ranks), key=lambda rank: loads[rank])
        loads[ranks[index]] += sizes[index]
    return ranks


class FullFromSlices:
    """How gradients of `parameters` reach their keepers, and updated values the owners of their elements.

    parameters: in the same order on all ranks. keepers: for each, the ranks of `group` that update it: one,
        or all.
    owned: what this rank owns of any parameter. memory: as of `Ownership`. If it is "shared", no values are sent
        back; if "sliced", keepers get those of full parameters with the gradients, until `give_back`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        keepers: Sequence[Sequence[int]],
        owned: Sequence[Slice],
        group: Group,
        *,
        memory: Memory = "whole",
    ) -> None:
        self._parameters = list(parameters)
        self._keepers = [tuple(ranks) for ranks in keepers]
        self._group = group
        number = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._positions = [index for index, slice_ in enumerate(owned) if id(slice_.parameter) in number]
        self._slices = [owned[index] for index in self._positions]
        self._mine = [
            _Part(number[id(slice_.parameter)], slice_.start, slice_.stop) for slice_ in self._slices
        ]
        self._parts: list[list[_Part]] | None = None  # of every rank, once known
        self._dtypes = sorted({parameter.dtype for parameter in parameters}, key=str)
        self._only_slices = memory == "sliced"
        self._emptied: list[tuple[nn.Parameter, Tensor]] = []  # and their values between updates
        self._sends_back = memory != "shared" and any(len(ranks) < group.size for ranks in self._keepers)

    def prepare(self) -> None:
        """Exchange which rank owns what, the first time it is called."""
        if self._parts is not None:
            return
        device = self._parameters[0].device
        counts = torch.empty(self._group.size, dtype=torch.int64, device=device)
        self._group.all_gather(counts, torch.tensor([len(self._mine)], device=device)).wait()
        longest = max(int(counts.max()), 1)
        mine = torch.full((longest, 3), -1, dtype=torch.int64)
        for row, part in zip(mine, self._mine, strict=False):
            row.copy_(torch.tensor(part))
        everyone = torch.empty(self._group.size * longest * 3, dtype=torch.int64, device=device)
        self._group.all_gather(everyone, mine.view(-1).to(device)).wait()
        rows: list[list[list[int]]] = everyone.view(self._group.size, longest, 3).tolist()
        self._parts = [[_Part(*row) for row in rank if row[0] >= 0] for rank in rows]

    def fetch(self, gradients: Sequence[Tensor | None]) -> None:
        """Set `.grad` of every parameter that this rank keeps; None if it was not used.

        gradients: of this rank's owned slices, flat, None if not used. Before every slice a flag is sent: 1
            used, 0 not.
        """
        self.prepare()
        found = {part: gradients[at] for part, at in zip(self._mine, self._positions, strict=True)}
        received = self._move(
            self._sent,
            lambda part: flagged(found[part], part.length, self._parameters[part.parameter]),
            num_extra=1,
        )
        whole: dict[int, Tensor] = {}
        used = {part.parameter: gradient is not None for part, gradient in found.items()}
        first: dict[int, Tensor] = {}
        for part, values in received:
            if part.parameter not in used:  # this rank owns nothing of it
                first.setdefault(part.parameter, values[0])
        if first:
            flags = torch.stack([each.double() for each in first.values()]).tolist()
            used |= {number: bool(flag) for number, flag in zip(first, flags, strict=True)}
        for part, values in received:
            if part.parameter not in whole:
                parameter = self._parameters[part.parameter]
                whole[part.parameter] = torch.zeros_like(
                    parameter.detach(), memory_format=torch.contiguous_format
                )
                parameter.grad = whole[part.parameter] if used[part.parameter] else None
            whole[part.parameter].view(-1)[part.start : part.stop] = values[1:]
        if self._only_slices:
            self._fetch_values()

    def give_back(self) -> None:
        """Write the keepers' new values into the slices that this rank owns."""
        mine = dict(zip(self._mine, self._slices, strict=True))
        if self._only_slices:
            for part, slice_ in mine.items():
                if self._group.rank in self._keepers[part.parameter]:
                    slice_.data().copy_(self._values(part))
        if self._sends_back:
            for part, values in self._move(self._returned, self._values):
                mine[part].data().copy_(values)
        for parameter, nothing in self._emptied:
            parameter.data = nothing
        self._emptied.clear()

    def _fetch_values(self) -> None:
        """Fill every parameter that this rank keeps with its owners' values."""
        mine = dict(zip(self._mine, self._slices, strict=True))
        filled: set[int] = set()
        for part, values in self._move(self._sent, lambda part: mine[part].data()):
            parameter = self._parameters[part.parameter]
            if part.parameter not in filled:
                filled.add(part.parameter)
                self._emptied.append((parameter, parameter.data))
                parameter.data = parameter.data.new_empty(parameter.shape)
            self._values(part).copy_(values)

    def _values(self, part: _Part) -> Tensor:
        return self._parameters[part.parameter].data.view(-1)[part.start : part.stop]

    def _move(
        self,
        parts: Callable[[int, int, torch.dtype], list[_Part]],
        piece: Callable[[_Part], Tensor],
        *,
        num_extra: int = 0,
    ) -> list[tuple[_Part, Tensor]]:
        """Send every rank flat pieces; what came from all ranks, in their order, by dtype.

        parts: which ones a rank sends another. piece: the elements of one [length + num_extra].
        """
        arrived = send_parts(
            self._group, self._dtypes, self._parameters[0].device, parts, lambda part, *_: part.length + num_extra, lambda part, _: piece(part)
        )  # fmt: skip
        return [(part, values) for part, _, values in arrived]

    def expected_bytes(self) -> ExpectedBytes:
        """Bytes that this rank hands to `group`. Those of `prepare` and of `give_back` are known after
        `prepare`."""
        here = self._group.rank
        there = list(range(self._group.size))
        total = sum(
            (part.length * (2 if self._only_slices else 1) + 1)
            * len(self._keepers[part.parameter])
            * self._parameters[part.parameter].element_size()
            for part in self._mine
        )
        for dtype in self._dtypes if self._parts is not None and self._sends_back else []:
            total += sum(
                part.length * dtype.itemsize for owner in there for part in self._returned(here, owner, dtype)
            )
        once = 0 if self._parts is None else 8 + 24 * max(1, *(len(parts) for parts in self._parts))
        return ExpectedBytes(
            once=Traffic.along("dp", all_gather=once), per_step=Traffic.along("dp", all_to_all=total)
        )

    def _sent(self, owner: int, keeper: int, dtype: torch.dtype) -> list[_Part]:
        """The slices whose gradients `owner` sends to `keeper`, in order."""
        assert self._parts is not None
        return [
            part
            for part in self._parts[owner]
            if keeper in self._keepers[part.parameter] and self._parameters[part.parameter].dtype == dtype
        ]

    def _returned(self, keeper: int, owner: int, dtype: torch.dtype) -> list[_Part]:
        """The slices whose values `keeper` sends to `owner`, in order: none of parameters that the owner
        keeps itself."""
        return [
            part for part in self._sent(owner, keeper, dtype) if owner not in self._keepers[part.parameter]
        ]
