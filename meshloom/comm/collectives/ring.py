"""A group whose sums and gathers go around a ring: each rank sends to the next, twice around for an all-reduce.

The elements are N pieces, one per rank. In the first round, partial sums travel and grow; in the second, the
sums travel. N = 3, pieces a b c:

                   rank 0 -> rank 1     rank 1 -> rank 2     rank 2 -> rank 0
    reduce-scatter       c0                   a1                   b2
                         b2+b0                c0+c1                a1+a2           rank 0 has a, rank 1 b, rank 2 c
    all-gather           a                    b                    c
                         c                    a                    b

2(N-1) steps, each moving 1/N of the elements (Patarasuk & Yuan, 2009). Each element is summed on one rank, in one order, and sent
from there to the others: all have equal bits.

Pieces travel in chunks: the first one of a step is sent on as soon as it is added, while the second is still received.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshloom.comm.background import Background, Patience
from meshloom.comm.group import Group, ReduceOp, Work
from meshloom.comm.recording import AroundGroup
from meshloom.comm.reductions import combine, divide
from meshloom.comm.simulated import SimulatedGroup
from meshloom.core.errors import CollectiveError
from meshloom.core.units import format_bytes

CHUNK_BYTES = 2**20  # benchmarks/rings has what others take
_AHEAD = 8  # receives that are posted before they are needed, so that a sender never waits for one
_END_SECONDS = 5.0  # that the thread has to end


def ring_group(
    group: Group,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    name: str = "",
    who_left: Callable[[], str | None] = lambda: None,
) -> RingGroup:
    """`group` with sums and gathers on a ring of all its ranks in order.

    Whoever calls this closes the result, before `group`, which has no other user meanwhile.

    chunk_bytes: maximum size of a message.
    name: of this rank in errors. who_left: the name of a rank that has aborted, or None.
    """
    return RingGroup(group, chunk_bytes, Patience(name or f"rank {group.rank}", who_left))


class RingGroup(AroundGroup):
    """Constructed by `ring_group`. Calls but sums and gathers are passed on. All of them run first in, first out: on processes
    in a thread, on simulated ranks, which have none, when their rank waits for one."""

    def __init__(self, group: Group, chunk_bytes: int, patience: Patience) -> None:
        super().__init__(group)
        self._chunk_bytes = chunk_bytes
        self._background: Background | None = None
        if isinstance(group, SimulatedGroup):
            self._start = group.start_later
        else:
            self._background = Background(f"ring of {patience.member}", patience)
            self._start = self._background.start

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        flat = self._flat(tensor, op)
        steps = range(2 * self.size - 2)
        return self._start(
            f"all_reduce of {format_bytes(flat.nbytes)}", lambda: self._around(flat, steps, op)
        )

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        full, own = self._flat(tensor, op), output.detach().view(-1)
        first = self.rank * own.numel()

        def run() -> None:
            sums = full.clone()  # the input is not changed
            self._around(sums, range(self.size - 1), op)
            own.copy_(sums[first : first + own.numel()])

        return self._start(f"reduce_scatter of {format_bytes(full.nbytes)}", run)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        full, own = output.detach().view(-1), tensor.detach().view(-1)
        first = self.rank * own.numel()

        def run() -> None:
            full[first : first + own.numel()] = own
            self._around(full, range(self.size - 1, 2 * self.size - 2), "sum")

        return self._start(f"all_gather of {format_bytes(own.nbytes)}", run)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._pass("broadcast", lambda: self.group.broadcast(tensor, source))

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Work:
        return self._pass("all_to_all", lambda: self.group.all_to_all(output, tensor, output_sizes, sizes))

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, destination: int) -> Work:
        return self._pass("gather", lambda: self.group.gather(outputs, tensor, destination))

    def send(self, tensor: Tensor, destination: int) -> Work:
        return self._pass("send", lambda: self.group.send(tensor, destination))

    def recv(self, tensor: Tensor, source: int) -> Work:
        return self._pass("recv", lambda: self.group.recv(tensor, source))

    def barrier(self) -> Work:
        return self._pass("barrier", self.group.barrier)

    def abort(self) -> None:
        if self._background:
            self._background.abort()
        super().abort()

    def close(self) -> None:
        """End the thread once the started operations are over; abort if other ranks do not join them."""
        if self._background and not self._background.close(_END_SECONDS):
            self.abort()

    def _around(self, flat: Tensor, steps: range, op: ReduceOp) -> None:
        """Some steps of an all-reduce of `flat` [n], in place: in step s a rank sends the piece `rank - 1 - s`, and that which
        arrives is the next one that it sends."""
        n, after, before = self.size, (self.rank + 1) % self.size, (self.rank - 1) % self.size
        arriving = deque((step, part) for step in steps for part in self._chunks(flat, step + 1))
        scratch = flat.new_empty(_AHEAD, max((part.numel() for _, part in arriving), default=0))
        posted: deque[tuple[int, Tensor, Work, Tensor]] = deque()
        num_posted = 0

        def post() -> None:
            nonlocal num_posted
            if arriving:
                step, mine = arriving.popleft()
                # a row is free again: chunks are used in the order in which they were posted
                into = scratch[num_posted % _AHEAD][: mine.numel()] if step < n - 1 else mine
                posted.append((step, mine, self.group.recv(into, before), into))
                num_posted += 1

        for _ in range(_AHEAD):
            post()
        sent = [self.group.send(part, after) for part in (self._chunks(flat, steps.start) if steps else ())]
        while posted:
            step, mine, work, arrived = posted.popleft()
            work.wait()
            if step < n - 1:
                combine(mine, arrived, op)
            if step == n - 2 and op == "avg":  # the sum is complete
                divide(mine, n)
            if step + 1 in steps:
                sent.append(self.group.send(mine, after))
            post()
        for work in sent:
            work.wait()

    def _chunks(self, flat: Tensor, step: int) -> Sequence[Tensor]:
        """The piece that this rank sends in a step. Pieces have almost equal sizes, larger ones first."""
        piece = flat.tensor_split(self.size)[(self.rank - 1 - step) % self.size]
        return piece.split(max(1, self._chunk_bytes // flat.element_size())) if piece.numel() else ()

    def _flat(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        """`tensor` [n], flat. Raises `CollectiveError` for a dtype without that reduction."""
        flat = tensor.detach().view(-1)
        try:
            combine(torch.empty_like(flat[:0]), flat[:0], op)
        except (RuntimeError, NotImplementedError) as error:
            raise CollectiveError(
                f"Tensors of {flat.dtype} cannot be reduced by {op} on a ring. Use exchange=all_reduce."
            ) from error
        return flat

    def _pass(self, what: str, start: Callable[[], Work]) -> Work:
        started: list[Work] = []
        return _Passed(self._start(what, lambda: started.append(start())), started)


class _Passed(Work):
    """An operation of the group underneath, started once the earlier ones are over."""

    def __init__(self, starting: Work, started: Sequence[Work]) -> None:
        self._starting, self._started = starting, started

    def wait(self) -> None:
        self._starting.wait()
        self._started[0].wait()

    def is_finished(self) -> bool:
        return self._starting.is_finished() and bool(self._started) and self._started[0].is_finished()
