"""A group over several hosts with the same number of ranks on each: what crosses the network is divided among
the ranks of a host.

An all-reduce on 2 hosts with 2 ranks each, of a tensor with halves x and y:

                          host 0                    host 1
                     rank 0     rank 1         rank 2     rank 3
    inside a host    x0+x1      y0+y1          x2+x3      y2+y3       reduce-scatter
    between hosts    x0+..+x3   y0+..+y3       x0+..+x3   y0+..+y3    rank 0 with 2, rank 1 with 3: half the bytes from each
    inside a host    x, y       x, y           x, y       x, y        all-gather

(Two levels as in Cho et al., "BlueConnect", 2019.) Reduce-scatter, all-gather, broadcast and barrier go
likewise. Messages take the short way if both ranks share a host. The rest goes straight over the group of all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshloom.comm.group import Group, ReduceOp, Work
from meshloom.comm.liveness.activity import Activity
from meshloom.comm.mean import divide
from meshloom.comm.network.phases import PhasedLine, Phases
from meshloom.comm.patience import BackgroundWork, Patience
from meshloom.core.errors import CollectiveError

_END_SECONDS = 5.0  # that threads are given to end


@dataclass(frozen=True, kw_only=True)
class HostsParts:
    """The groups underneath, of which one rank is a member.

    first, last, post: each of the ranks of this host, in the same order: for what comes before the network,
    after it, and for messages. across: the ranks that have this rank's number in `first` on their hosts, in
    order of the hosts.
    whole: all ranks.
    """

    first: Group
    last: Group
    post: Group
    across: Group
    whole: Group

    @property
    def all(self) -> tuple[Group, ...]:
        return self.first, self.last, self.post, self.across, self.whole


class HostsGroup(Group):
    """Whoever makes it closes it, and then the groups underneath.

    hosts: the group's ranks on each host, as many on each.
    members: what to call each rank in errors, like "rank 3 (dp=3)".
    activity: where this rank writes that it waits; `post` and `whole` write there themselves. After a wait
    that failed it still says so. who_left: what to call a rank that has aborted, if one has; a waiting rank
    asks once a second.
    """

    def __init__(
        self,
        hosts: Sequence[Sequence[int]],
        parts: HostsParts,
        members: Sequence[str],
        activity: Activity | None = None,
        who_left: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._hosts = tuple(tuple(ranks) for ranks in hosts)
        self._parts = parts
        self._members = tuple(members)
        self._places = {
            rank: (host, index) for host, ranks in enumerate(self._hosts) for index, rank in enumerate(ranks)
        }
        self._host, self._index = self._places[parts.whole.rank]
        expected = parts.whole.size, len(self._hosts), *[len(self._hosts[0])] * 3
        found = (
            len(self._places),
            *[group.size for group in (parts.across, parts.first, parts.last, parts.post)],
        )
        if found != expected or {len(ranks) for ranks in self._hosts} != {len(self._hosts[0])}:
            raise CollectiveError(
                f"Hosts with ranks {list(self._hosts)} need the same number on each, and groups of these sizes; they are {found}."
            )
        self.who_left = who_left
        self._patience = Patience(self._members[self.rank], activity, who_left)
        self._line = PhasedLine(f"group of {self._members[self.rank]}")

    @property
    def rank(self) -> int:
        return self._parts.whole.rank

    @property
    def size(self) -> int:
        return self._parts.whole.size

    @property
    def secret(self) -> bytes:
        return self._parts.whole.secret

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        flat = tensor.detach().view(-1)
        k = len(self._hosts[0])
        n = flat.numel() // k
        # rest: what does not divide by k; the first rank of each host takes it across
        body, rest = flat[: n * k], flat[n * k :]
        leads = self._index == 0
        mine = torch.empty(n + (rest.numel() if leads else 0), dtype=flat.dtype)

        def first() -> None:
            inside = _nonempty(body, lambda: self._parts.first.reduce_scatter(mine[:n], body, _summed(op)))
            inside += _nonempty(rest, lambda: self._parts.first.all_reduce(rest, _summed(op)))
            _wait(inside)
            if leads:
                mine[n:] = rest

        def second() -> Sequence[Work]:
            return _nonempty(mine, lambda: self._parts.across.all_reduce(mine, _summed(op)))

        def third() -> None:
            if op == "avg":
                divide(mine, self.size)
            if leads:
                rest.copy_(mine[n:])
            inside = _nonempty(body, lambda: self._parts.last.all_gather(body, mine[:n]))
            _wait(inside + _nonempty(rest, lambda: self._parts.last.broadcast(rest, 0)))

        return self._start(f"all_reduce of {flat.nbytes} bytes", first, second, third)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        output, flat = output.detach().view(-1), tensor.detach().view(-1)
        # [h]: the sum over this host of what is for this index of host h
        mine = torch.empty(len(self._hosts), output.numel(), dtype=flat.dtype)

        def first() -> None:
            slices = [self._slices(flat, host) for host in range(len(self._hosts))]
            _wait(
                [
                    self._parts.first.reduce_scatter(sums, slice_, _summed(op))
                    for sums, slice_ in zip(mine, slices, strict=True)
                ]
            )

        def second() -> Sequence[Work]:
            return [self._parts.across.reduce_scatter(output, mine.view(-1), _summed(op))]

        def third() -> None:
            if op == "avg":
                divide(output, self.size)

        return self._start(f"reduce_scatter of {flat.nbytes} bytes", first, second, third)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        output, flat = output.detach().view(-1), tensor.detach().view(-1)
        mine = torch.empty(len(self._hosts), flat.numel(), dtype=flat.dtype)  # [h]: from this index of host h

        def second() -> Sequence[Work]:
            return [self._parts.across.all_gather(mine.view(-1), flat)]

        def third() -> None:
            slices = [self._slices(output, host, filled=False) for host in range(len(self._hosts))]
            _wait(
                [
                    self._parts.last.all_gather(slice_, theirs)
                    for slice_, theirs in zip(slices, mine, strict=True)
                ]
            )
            for ranks, slice_ in zip(self._hosts, slices, strict=True):
                if not _consecutive(ranks):
                    output.view(self.size, flat.numel())[list(ranks)] = slice_.view(len(ranks), flat.numel())

        return self._start(f"all_gather of {flat.nbytes} bytes", _nothing, second, third)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        flat = tensor.detach().view(-1)
        host, index = self._places[source]
        k, here = len(self._hosts[0]), self._host == host
        n = flat.numel() // k
        body, rest = flat[: n * k], flat[n * k :]
        mine = body[n * self._index : n * (self._index + 1)]
        mine = mine if here else torch.empty_like(mine)

        def first() -> None:
            if here:
                _wait([self._parts.first.broadcast(flat, index)])

        def second() -> Sequence[Work]:
            works = _nonempty(mine, lambda: self._parts.across.broadcast(mine, host))
            return works + (
                _nonempty(rest, lambda: self._parts.across.broadcast(rest, host)) if self._index == 0 else []
            )

        def third() -> None:
            if not here:
                inside = _nonempty(body, lambda: self._parts.last.all_gather(body, mine))
                _wait(inside + _nonempty(rest, lambda: self._parts.last.broadcast(rest, 0)))

        return self._start(
            f"broadcast of {flat.nbytes} bytes from {self._members[source]}", first, second, third
        )

    def barrier(self) -> Work:
        parts = self._parts
        return self._start(
            "barrier",
            lambda: parts.first.barrier().wait(),
            lambda: [parts.across.barrier()],
            lambda: parts.last.barrier().wait(),
        )

    def send(self, tensor: Tensor, destination: int) -> Work:
        host, index = self._places[destination]
        return (
            self._parts.post.send(tensor, index)
            if host == self._host
            else self._parts.whole.send(tensor, destination)
        )

    def recv(self, tensor: Tensor, source: int) -> Work:
        host, index = self._places[source]
        return (
            self._parts.post.recv(tensor, index)
            if host == self._host
            else self._parts.whole.recv(tensor, source)
        )

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Work:
        return self._parts.whole.all_to_all(output, tensor, output_sizes, sizes)

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, destination: int) -> Work:
        return self._parts.whole.gather(outputs, tensor, destination)

    def scatter(self, output: Tensor, tensors: Sequence[Tensor] | None, source: int) -> Work:
        return self._parts.whole.scatter(output, tensors, source)

    def abort(self) -> None:
        self._patience.aborted = True
        for group in self._parts.all:
            group.abort()
        self._line.close(_END_SECONDS)  # what its threads wait for fails now

    def close(self) -> None:
        """End this group's threads, once what was started is over; what other ranks do not join within
        seconds never will be."""
        if not self._line.close(_END_SECONDS):
            self.abort()

    def _start(
        self,
        what: str,
        first: Callable[[], None],
        second: Callable[[], Sequence[Work]],
        third: Callable[[], None],
    ) -> Work:
        self._patience.check(what)
        return BackgroundWork(
            self._patience, self._line.start(Phases(first=first, second=second, third=third)), what
        )

    def _slices(self, flat: Tensor, host: int, *, filled: bool = True) -> Tensor:
        """Of `flat` [size * n] those of the ranks of a host, [k * n]; a part of `flat` if its ranks are
        numbered consecutively."""
        ranks = self._hosts[host]
        n = flat.numel() // self.size
        if _consecutive(ranks):
            return flat[ranks[0] * n : (ranks[-1] + 1) * n]
        return (
            flat.view(self.size, n)[list(ranks)].view(-1)
            if filled
            else torch.empty(len(ranks) * n, dtype=flat.dtype)
        )


def _consecutive(ranks: Sequence[int]) -> bool:
    return tuple(ranks) == tuple(range(ranks[0], ranks[0] + len(ranks)))


def _summed(op: ReduceOp) -> ReduceOp:
    """What every phase but the last one does for `op`: there is one division, at the end."""
    return "sum" if op == "avg" else op


def _nonempty(tensor: Tensor, start: Callable[[], Work]) -> list[Work]:
    """What `start` starts, unless `tensor` is empty, as it then is on all ranks of the group in question."""
    return [start()] if tensor.numel() else []


def _wait(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


def _nothing() -> None:
    pass
