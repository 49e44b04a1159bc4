"""Collectives of a few ranks over Gloo as messages between all pairs: each rank sends every other rank its part,
from where it is to where it belongs.

    rank 0   a b c  ->  to 1: b, to 2: c   received a' a"   a + a' + a"
    rank 1   a' b' c' ...

Gloo's own all-gather and reduce-scatter copy their tensors, and take twice as long (benchmarks/step). With many
ranks each would receive from all others at a time, so those keep Gloo's, as do small tensors, for which a thread
costs more than it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor

from meshloom.comm.background import Background, Patience
from meshloom.comm.group import ReduceOp, Work
from meshloom.comm.reductions import combine, divide
from meshloom.comm.torch.c10d_operations import C10dOperations
from meshloom.core.units import format_bytes

_MOST_RANKS = 8
_LEAST_BYTES = 64 << 10  # of a rank's part
_TAGS = range(1, 1 << 30)  # messages of the group itself have tag 0


class DirectExchange:
    """Of the ranks of one Gloo process group, in a thread that starts with the first operation.

    members: as of the group.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        members: Sequence[str],
        operations: C10dOperations,
    ) -> None:
        self._process_group, self._members, self._operations = process_group, members, operations
        self._rank, self._size = process_group.rank(), process_group.size()
        self._patience = Patience(members[self._rank], operations.who_left, operations.who_is_gone)
        self._background: Background | None = None
        self._tags = cycle(_TAGS)  # ranks start the same operations in the same order

    def serves(self, part: Tensor) -> bool:
        """Whether collectives with parts like this one are exchanged directly; the same on all ranks."""
        few = 1 < self._size <= _MOST_RANKS
        return few and part.device.type == "cpu" and part.nbytes >= _LEAST_BYTES

    def all_gather(self, output: Tensor, part: Tensor) -> Work:
        """As `Group.all_gather`; both are contiguous."""
        what = f"all_gather of {format_bytes(part.nbytes)}"
        parts, own = output.view(self._size, -1), part.view(-1)

        def finish() -> None:
            if parts[self._rank].data_ptr() != own.data_ptr():
                parts[self._rank].copy_(own)

        return self._start(what, lambda _: own, list(parts), finish, 0)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp) -> Work:
        """As `Group.reduce_scatter`; both are contiguous. Parts are added in the order of the ranks."""
        what = f"reduce_scatter of {format_bytes(tensor.nbytes)}"
        parts, target = tensor.view(self._size, -1), output.view(-1)
        others = [torch.empty_like(target) for _ in range(self._size - 1)]
        received = [*others[: self._rank], parts[self._rank], *others[self._rank :]]

        def finish() -> None:
            total = target.copy_(received[0]) if self._rank == 0 else received[0]
            for each in received[1:]:
                combine(total, each, op)
            if op == "avg":
                divide(total, self._size)
            if total is not target:
                target.copy_(total)

        return self._start(
            what, lambda rank: parts[rank], received, finish, sum(each.nbytes for each in others)
        )

    def abort(self) -> None:
        """Start nothing more."""
        self._patience.aborted = True

    def close(self, seconds: float) -> bool:
        """End the thread; whether that took at most `seconds`."""
        background, self._background = self._background, None
        return background is None or background.close(seconds)

    def _start(
        self,
        what: str,
        sent: Callable[[int], Tensor],
        received: Sequence[Tensor],
        finish: Callable[[], None],
        held_bytes: int,
    ) -> Work:
        """Post all messages; `finish` is called in the thread once they are over. sent: to a rank. received: from each."""
        self._patience.check(what)
        self._operations.make_room(held_bytes)
        if self._background is None:
            self._background = Background("direct exchange", self._patience)
        tag, group = next(self._tags), self._process_group
        messages: list[Work] = []
        with self._operations.explained(what):
            for distance in range(1, self._size):
                source, destination = (
                    (self._rank - distance) % self._size,
                    (self._rank + distance) % self._size,
                )
                arrives, leaves = received[source], sent(destination)
                for verb, work, peer, tensor in (
                    (
                        "recv of {} from",
                        dist.irecv(arrives, group=group, group_src=source, tag=tag),
                        source,
                        arrives,
                    ),
                    (
                        "send of {} to",
                        dist.isend(leaves, group=group, group_dst=destination, tag=tag),
                        destination,
                        leaves,
                    ),
                ):
                    name = f"{verb.format(format_bytes(tensor.nbytes))} {self._members[peer]}"
                    messages.append(_Message(self._operations, work, name, tensor))

        def run() -> None:
            for message in messages:
                message.wait()
            finish()

        started = self._background.start(what, run)
        if held_bytes:
            self._operations.hold(started, held_bytes)
        return started


@dataclass(eq=False)
class _Message(Work):
    operations: C10dOperations
    work: dist.Work | None
    what: str
    tensor: Tensor  # kept alive while the backend uses its memory

    def wait(self) -> None:
        if self.work is not None:
            with self.operations.explained(self.what):
                self.work.wait()
            self.work = None

    def is_finished(self) -> bool:
        return self.work is None
