"""The three phases of each two-level collective: inside hosts, between hosts, inside hosts again.

An all-reduce on 2 hosts with 2 ranks each, of a tensor with halves x and y:

                          host 0                    host 1
                     rank 0     rank 1         rank 2     rank 3
    inside a host    x0+x1      y0+y1          x2+x3      y2+y3       reduce-scatter
    between hosts    x0+..+x3   y0+..+y3       x0+..+x3   y0+..+y3    rank 0 with 2, rank 1 with 3: half the bytes from each
    inside a host    x, y       x, y           x, y       x, y        all-gather

(Cho et al., "BlueConnect", 2019.) Reduce-scatter, all-gather, broadcast and barrier work likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshloom.comm.group import Group, ReduceOp, Work
from meshloom.comm.network.phases import Phases
from meshloom.comm.reductions import divide


@dataclass(frozen=True, kw_only=True)
class HostsParts:
    """The groups underneath a group over hosts, of each of which this rank is a member.

    first, last, messages: all of the ranks of this host, in the same order: for the phase before the network,
        for the phase after it, and for point-to-point messages.
    across: the ranks with this rank's index on their hosts, in order of the hosts.
    all_ranks: every rank.
    """

    first: Group
    last: Group
    messages: Group
    across: Group
    all_ranks: Group

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.first, self.last, self.messages, self.across, self.all_ranks


class TwoLevel:
    """Collectives of one rank in three phases.

    hosts: ranks on each host, equally many on each, k. Tensors are contiguous CPU tensors.
    """

    def __init__(self, hosts: Sequence[Sequence[int]], parts: HostsParts) -> None:
        self._hosts, self._parts = hosts, parts
        self._k = len(hosts[0])
        self.places = {
            rank: (host, index) for host, ranks in enumerate(hosts) for index, rank in enumerate(ranks)
        }
        self.host, self._index = self.places[parts.all_ranks.rank]
        self._size = len(self.places)

    def all_reduce(self, flat: Tensor, op: ReduceOp) -> Phases:
        """Of `flat` [n], in place."""
        parts, is_first = self._parts, self._index == 0
        n = flat.numel() // self._k
        # rest: what does not divide by k; the first rank of each host reduces it between hosts
        body, rest = flat[: n * self._k], flat[n * self._k :]
        part = torch.empty(n + (rest.numel() if is_first else 0), dtype=flat.dtype)

        def first() -> None:
            inside = _nonempty(body, lambda: parts.first.reduce_scatter(part[:n], body, _sum_for(op)))
            _wait(inside + _nonempty(rest, lambda: parts.first.all_reduce(rest, _sum_for(op))))
            if is_first:
                part[n:] = rest

        def second() -> Sequence[Work]:
            return _nonempty(part, lambda: parts.across.all_reduce(part, _sum_for(op)))

        def third() -> None:
            if op == "avg":
                divide(part, self._size)
            if is_first:
                rest.copy_(part[n:])
            inside = _nonempty(body, lambda: parts.last.all_gather(body, part[:n]))
            _wait(inside + _nonempty(rest, lambda: parts.last.broadcast(rest, 0)))

        return Phases(first=first, second=second, third=third)

    def reduce_scatter(self, output: Tensor, flat: Tensor, op: ReduceOp) -> Phases:
        """Of `flat` [size * n] to `output` [n]."""
        # [h]: this host's sum of the slice for the rank with this index on host h
        sums = torch.empty(len(self._hosts), output.numel(), dtype=flat.dtype)

        def first() -> None:
            slices = [self._slices(flat, ranks) for ranks in self._hosts]
            pairs = zip(sums, slices, strict=True)
            _wait([self._parts.first.reduce_scatter(total, each, _sum_for(op)) for total, each in pairs])

        def second() -> Sequence[Work]:
            return [self._parts.across.reduce_scatter(output, sums.view(-1), _sum_for(op))]

        def third() -> None:
            if op == "avg":
                divide(output, self._size)

        return Phases(first=first, second=second, third=third)

    def all_gather(self, output: Tensor, flat: Tensor) -> Phases:
        """Of `flat` [n] to `output` [size * n]."""
        # [h]: the tensor of the rank with this index on host h
        gathered = torch.empty(len(self._hosts), flat.numel(), dtype=flat.dtype)

        def second() -> Sequence[Work]:
            return [self._parts.across.all_gather(gathered.view(-1), flat)]

        def third() -> None:
            slices = [self._slices(output, ranks, filled=False) for ranks in self._hosts]
            pairs = zip(slices, gathered, strict=True)
            _wait([self._parts.last.all_gather(into, part) for into, part in pairs])
            for ranks, into in zip(self._hosts, slices, strict=True):
                if not _consecutive(ranks):
                    output.view(self._size, flat.numel())[list(ranks)] = into.view(self._k, flat.numel())

        return Phases(first=lambda: None, second=second, third=third)

    def broadcast(self, flat: Tensor, source: int) -> Phases:
        """Of `flat` [n], in place."""
        parts = self._parts
        host, index = self.places[source]
        is_here = self.host == host
        n = flat.numel() // self._k
        body, rest = flat[: n * self._k], flat[n * self._k :]
        part = body[n * self._index : n * (self._index + 1)]
        part = part if is_here else torch.empty_like(part)

        def first() -> None:
            if is_here:
                parts.first.broadcast(flat, index).wait()

        def second() -> Sequence[Work]:
            works = _nonempty(part, lambda: parts.across.broadcast(part, host))
            if self._index == 0:
                works += _nonempty(rest, lambda: parts.across.broadcast(rest, host))
            return works

        def third() -> None:
            if not is_here:
                inside = _nonempty(body, lambda: parts.last.all_gather(body, part))
                _wait(inside + _nonempty(rest, lambda: parts.last.broadcast(rest, 0)))

        return Phases(first=first, second=second, third=third)

    def barrier(self) -> Phases:
        parts = self._parts
        return Phases(
            first=lambda: parts.first.barrier().wait(),
            second=lambda: [parts.across.barrier()],
            third=lambda: parts.last.barrier().wait(),
        )

    def _slices(self, flat: Tensor, ranks: Sequence[int], *, filled: bool = True) -> Tensor:
        """Of `flat` [size * n] the slices of a host's ranks, [k * n]: a view of it if the ranks are
        consecutive; otherwise a copy, or uninitialised memory of that size if not `filled`."""
        n = flat.numel() // self._size
        if _consecutive(ranks):
            return flat[ranks[0] * n : (ranks[-1] + 1) * n]
        if filled:
            return flat.view(self._size, n)[list(ranks)].view(-1)
        return torch.empty(len(ranks) * n, dtype=flat.dtype)


def _consecutive(ranks: Sequence[int]) -> bool:
    return tuple(ranks) == tuple(range(ranks[0], ranks[0] + len(ranks)))


def _sum_for(op: ReduceOp) -> ReduceOp:
    """The reduction of each phase: an average is a sum, divided once at the end."""
    return "sum" if op == "avg" else op


def _nonempty(tensor: Tensor, start: Callable[[], Work]) -> list[Work]:
    """The started work, unless `tensor` is empty, as it then is on all ranks of the group in question."""
    return [start()] if tensor.numel() else []


def _wait(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()
