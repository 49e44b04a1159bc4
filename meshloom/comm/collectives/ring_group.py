"""A group whose all-reduces, reduce-scatters and all-gathers go around a ring, on `send` and `recv` of the group underneath.

Every other call is passed on. All of them run first in, first out, in the background: on processes in a
thread, on simulated ranks whenever one of them waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshloom.comm.background import Background, Patience
from meshloom.comm.chunked_moves import CHUNK_BYTES, Waits, in_chunks, run_moves
from meshloom.comm.collectives import ring
from meshloom.comm.group import Group, ReduceOp, Work
from meshloom.comm.liveness.activity import Activity
from meshloom.comm.moves import Move, piece_offsets
from meshloom.comm.recording import AroundGroup
from meshloom.comm.reductions import combine
from meshloom.comm.simulated import SimulatedGroup
from meshloom.core.errors import CollectiveError
from meshloom.core.units import format_bytes

_END_SECONDS = 5.0  # that the thread has to end
_MAX_LISTS = 256  # of moves that are cached; a training job has as many as buckets


def ring_group(
    group: Group,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    name: str = "",
    activity: Activity | None = None,
    who_left: Callable[[], str | None] = lambda: None,
) -> RingGroup:
    """`group` with sums and gathers on a ring of all its ranks in order.

    Whoever calls this closes the result, before `group`, which has no other user meanwhile.

    chunk_bytes: maximum size of a message.
    name: of this rank in errors. activity: where it notes that it waits. who_left: the name of a rank that
    has aborted, or None. Raises `CollectiveError` for a message without bytes.
    """
    if chunk_bytes < 1:
        raise CollectiveError(f"chunk_bytes={chunk_bytes} must be 1 or more.")
    activity = activity or Activity()
    patience = Patience(name or f"rank {group.rank}", activity, who_left)
    return RingGroup(group, chunk_bytes, patience, activity)


class RingGroup(AroundGroup):
    """Constructed by `ring_group`.

    sent_messages, sent_bytes: sent so far by this rank around the ring.
    """

    def __init__(self, group: Group, chunk_bytes: int, patience: Patience, activity: Activity) -> None:
        super().__init__(group)
        self.sent_messages = 0
        self.sent_bytes = 0
        self._chunk_bytes = chunk_bytes
        self._activity = activity
        # by operation, number of elements, and elements of a chunk
        self._chunks: dict[tuple[str, int, int], list[Move]] = {}
        self._background: Background | None = None
        if isinstance(group, SimulatedGroup):  # its ranks have no threads
            self._start = group.start_steps
        else:
            self._background = Background(f"ring of {patience.member}", patience)
            self._start = self._background.start

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        flat = self._flat(tensor, op)
        mean = op == "avg"
        chunks = self._planned(
            f"all_reduce {mean}", flat, lambda: ring.all_reduce(self.rank, self.size, flat.numel(), mean=mean)
        )
        return self._start(
            f"all_reduce of {format_bytes(flat.nbytes)}", run_moves(self.group, chunks, flat, op)
        )

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        full, own = self._flat(tensor, op), output.detach().view(-1)
        first = self.rank * own.numel()
        chunks = self._planned(
            "reduce_scatter", full, lambda: ring.reduce_scatter(self.rank, self._pieces(full))
        )

        def steps() -> Waits:
            sums = full.clone()  # the input is not changed
            yield from run_moves(self.group, chunks, sums, op)
            mine = sums[first : first + own.numel()]
            own.copy_(mine / self.size if op == "avg" else mine)

        return self._start(f"reduce_scatter of {format_bytes(full.nbytes)}", steps())

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        full, own = output.detach().view(-1), tensor.detach().view(-1)
        first = self.rank * own.numel()
        chunks = self._planned("all_gather", full, lambda: ring.all_gather(self.rank, self._pieces(full)))

        def steps() -> Waits:
            full[first : first + own.numel()] = own
            yield from run_moves(self.group, chunks, full, "sum")

        return self._start(f"all_gather of {format_bytes(own.nbytes)}", steps())

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._pass("broadcast", lambda: self.group.broadcast(tensor, source))

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Work:
        return self._pass("all_to_all", lambda: self.group.all_to_all(output, tensor, output_sizes, sizes))

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, destination: int) -> Work:
        return self._pass("gather", lambda: self.group.gather(outputs, tensor, destination))

    def scatter(self, output: Tensor, tensors: Sequence[Tensor] | None, source: int) -> Work:
        return self._pass("scatter", lambda: self.group.scatter(output, tensors, source))

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

    def _pieces(self, full: Tensor) -> list[int]:
        return piece_offsets(full.numel(), self.size)

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

    def _planned(self, operation: str, flat: Tensor, moves: Callable[[], list[Move]]) -> list[Move]:
        """The moves in chunks; counts what they send."""
        chunk = max(1, self._chunk_bytes // flat.element_size())
        key = operation, flat.numel(), chunk
        if key not in self._chunks:
            if len(self._chunks) == _MAX_LISTS:
                self._chunks.clear()
            self._chunks[key] = in_chunks(moves(), chunk)
        chunks = self._chunks[key]
        sent = [move.stop - move.start for move in chunks if move.kind == "send"]
        self.sent_messages += len(sent)
        self.sent_bytes += sum(sent) * flat.element_size()
        return chunks

    def _pass(self, what: str, start: Callable[[], Work]) -> Work:
        started: list[Work] = []

        def steps() -> Waits:
            started.append(start())
            return
            yield

        return _Passed(self._start(what, steps()), started, self._activity)


class _Passed(Work):
    """An operation of the group underneath, started once the earlier ones are over."""

    def __init__(self, starting: Work, started: Sequence[Work], activity: Activity) -> None:
        self._starting, self._started, self._activity = starting, started, activity

    def wait(self) -> None:
        self._starting.wait()
        self._activity.waits()
        self._started[0].wait()
        self._activity.goes_on()

    def is_finished(self) -> bool:
        return self._starting.is_finished() and bool(self._started) and self._started[0].is_finished()
