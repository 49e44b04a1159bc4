"""The group over several hosts with equally many ranks on each, which divide the bytes between two hosts.

Collectives run in three phases (`two_level.py`). Messages between ranks of one host stay on that host.
Everything else goes over the group of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from meshloom.comm.background import BackgroundWork, Patience
from meshloom.comm.group import Group, ReduceOp, Work
from meshloom.comm.network.phases import PhasedLine, Phases
from meshloom.comm.network.two_level import HostsParts, TwoLevel
from meshloom.core.errors import CollectiveError
from meshloom.core.units import format_bytes

_END_SECONDS = 5.0  # that threads have to end


class HostsGroup(Group):
    """Whoever constructs it closes it, and then the groups underneath.

    hosts: ranks on each host, equally many on each.
    members: name of each rank in errors, like "rank 3 (dp=3)".
    who_left: the name of a rank that has aborted, or None; called once a second during a wait.
    """

    def __init__(
        self,
        hosts: Sequence[Sequence[int]],
        parts: HostsParts,
        members: Sequence[str],
        who_left: Callable[[], str | None] = lambda: None,
    ) -> None:
        hosts = tuple(tuple(ranks) for ranks in hosts)
        k = len(hosts[0])
        expected = parts.all_ranks.size, len(hosts), k, k, k
        sizes = (
            len({rank for ranks in hosts for rank in ranks}),
            *(group.size for group in (parts.across, parts.first, parts.last, parts.messages)),
        )
        if sizes != expected or {len(ranks) for ranks in hosts} != {k}:
            raise CollectiveError(
                f"Hosts with ranks {list(hosts)} need the same number on each, and groups of these sizes; they are {sizes}."
            )
        self._parts, self._members = parts, tuple(members)
        self.rank, self.size, self.secret = parts.all_ranks.rank, parts.all_ranks.size, parts.all_ranks.secret
        self._two_level = TwoLevel(hosts, parts)
        self.who_left = who_left
        self._patience = Patience(self._members[self.rank], who_left)
        self._line = PhasedLine(f"group of {self._members[self.rank]}")

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        flat = tensor.detach().view(-1)
        return self._start(f"all_reduce of {format_bytes(flat.nbytes)}", self._two_level.all_reduce(flat, op))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        output, flat = output.detach().view(-1), tensor.detach().view(-1)
        phases = self._two_level.reduce_scatter(output, flat, op)
        return self._start(f"reduce_scatter of {format_bytes(flat.nbytes)}", phases)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        output, flat = output.detach().view(-1), tensor.detach().view(-1)
        phases = self._two_level.all_gather(output, flat)
        return self._start(f"all_gather of {format_bytes(flat.nbytes)}", phases)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        flat = tensor.detach().view(-1)
        what = f"broadcast of {format_bytes(flat.nbytes)} from {self._members[source]}"
        return self._start(what, self._two_level.broadcast(flat, source))

    def barrier(self) -> Work:
        return self._start("barrier", self._two_level.barrier())

    def send(self, tensor: Tensor, destination: int) -> Work:
        group, peer = self._route(destination)
        return group.send(tensor, peer)

    def recv(self, tensor: Tensor, source: int) -> Work:
        group, peer = self._route(source)
        return group.recv(tensor, peer)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Work:
        return self._parts.all_ranks.all_to_all(output, tensor, output_sizes, sizes)

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, destination: int) -> Work:
        return self._parts.all_ranks.gather(outputs, tensor, destination)

    def abort(self) -> None:
        self._patience.aborted = True
        for group in self._parts.groups:
            group.abort()
        self._line.close(_END_SECONDS)  # what its threads wait for fails now

    def close(self) -> None:
        """End the threads once the started operations are over; abort if other ranks do not join them."""
        if not self._line.close(_END_SECONDS):
            self.abort()

    def _route(self, rank: int) -> tuple[Group, int]:
        """The group for messages to or from a rank, and its number in it."""
        host, index = self._two_level.places[rank]
        is_here = host == self._two_level.host
        return (self._parts.messages, index) if is_here else (self._parts.all_ranks, rank)

    def _start(self, what: str, phases: Phases) -> Work:
        self._patience.check(what)
        return BackgroundWork(self._patience, self._line.start(phases), what)
