"""Groups over torch.distributed process groups: Gloo between CPU tensors, NCCL between CUDA tensors.

Every operation starts asynchronously. What a backend lacks is put together from what it has: avg is a sum
that is
divided in `wait()`, a barrier is an all-reduce of one element.

A rank that goes away. When its process ends, its connections close and operations under way fail everywhere.
While
it lives, `abort()` leaves a note in the group's store, which waiting ranks look at once a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshloom.comm.group import Group, ReduceOp, Work
from meshloom.comm.liveness.activity import Activity
from meshloom.comm.liveness.notes import Notes
from meshloom.comm.mean import divide
from meshloom.core.errors import ABORTED, CollectiveError, PeerLostError
from meshloom.core.units import format_bytes

# torch 2.13 renamed these two and warns about the old names.
_all_gather: Callable[..., Any] = getattr(
    dist, "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
)
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_GLANCE = timedelta(seconds=1)
# Gloo copies what it scatters or gathers, until somebody has waited for it. Above so many bytes under way the
# oldest is waited for first.
_COPIED_BYTES = 64 << 20

# Fragments of what Gloo, NCCL and the store say, in lower case.
_LOST = (
    "connection",
    "closed",
    "reset by peer",
    "broken pipe",
    "timed out",
    "timeout",
    "abort",
    "remote",
    "nccl",
    "socket",
    "store",
)
_TIMED_OUT = ("timed out", "timeout")
_UNEQUAL = ("op.preamble", "size mismatch", "must be same", "nbytes")


class C10dGroup(Group):
    """One process group.

    process_group: of torch.distributed, this process being a member.
    members: what to call each of its ranks in errors, like "rank 3 (dp=3)".
    device: where a barrier's element lies; with a backend for both, tensors of any device can be handed in.
    activity: where this rank writes that it waits. After a wait that failed it still says so.
    secret: what its ranks know and their network does not.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        members: Sequence[str],
        device: torch.device | None = None,
        activity: Activity | None = None,
        secret: bytes = b"",
    ) -> None:
        self._secret = secret
        self._process_group = process_group
        self._members = tuple(members)
        self._device = device or torch.device("cpu")
        self._activity = activity or Activity()
        self._notes = Notes(process_group.get_group_store)
        self._aborted = False
        self._copied: deque[_C10dWork] = deque()  # under way, of which the backend holds a copy

    @property
    def rank(self) -> int:
        return self._process_group.rank()

    @property
    def size(self) -> int:
        return self._process_group.size()

    @property
    def secret(self) -> bytes:
        return self._secret

    @property
    def is_in_place(self) -> bool:
        return True

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        tensor = tensor.detach()
        return self._start(
            f"all_reduce of {format_bytes(tensor.nbytes)}",
            [tensor],
            lambda: dist.all_reduce(tensor, _OPS[op], group=self._process_group, async_op=True),
            (lambda: divide(tensor, self.size)) if op == "avg" else None,
        )

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        output, tensor = output.detach(), tensor.detach()
        # Gloo's own is an all-reduce of a copy.
        of_all = (
            tensor.device.type == "cpu" and output.data_ptr() == tensor.data_ptr() + self.rank * output.nbytes
        )
        return self._start(
            f"reduce_scatter of {format_bytes(tensor.nbytes)}",
            [output, tensor],
            (lambda: dist.all_reduce(tensor, _OPS[op], group=self._process_group, async_op=True))
            if of_all
            else lambda: _reduce_scatter(
                output.view(-1), tensor.view(-1), op=_OPS[op], group=self._process_group, async_op=True
            ),
            (lambda: divide(output, self.size)) if op == "avg" else None,
            copied_bytes=0 if of_all else tensor.nbytes,
        )

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        output, tensor = output.detach(), tensor.detach()
        return self._start(
            f"all_gather of {format_bytes(tensor.nbytes)}",
            [output, tensor],
            lambda: _all_gather(output.view(-1), tensor.view(-1), group=self._process_group, async_op=True),
            copied_bytes=output.nbytes,
        )

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Work:
        output, tensor = output.detach(), tensor.detach()
        return self._start(
            f"all_to_all of {format_bytes(tensor.nbytes)}",
            [output, tensor],
            lambda: dist.all_to_all_single(
                output, tensor, list(output_sizes), list(sizes), group=self._process_group, async_op=True
            ),
        )

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, destination: int) -> Work:
        tensor = tensor.detach()
        targets = (
            [output.detach() for output in outputs]
            if outputs is not None and self.rank == destination
            else None
        )
        return self._start(
            f"gather of {format_bytes(tensor.nbytes)} to {self._members[destination]}",
            [tensor, *(targets or ())],
            lambda: dist.gather(
                tensor, targets, group=self._process_group, group_dst=destination, async_op=True
            ),
        )

    def scatter(self, output: Tensor, tensors: Sequence[Tensor] | None, source: int) -> Work:
        output = output.detach()
        sent = (
            [tensor.detach() for tensor in tensors] if tensors is not None and self.rank == source else None
        )
        return self._start(
            f"scatter of {format_bytes(output.nbytes)} from {self._members[source]}",
            [output, *(sent or ())],
            lambda: dist.scatter(output, sent, group=self._process_group, group_src=source, async_op=True),
        )

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        tensor = tensor.detach()
        return self._start(
            f"broadcast of {format_bytes(tensor.nbytes)} from {self._members[source]}",
            [tensor],
            lambda: dist.broadcast(tensor, group_src=source, group=self._process_group, async_op=True),
        )

    def send(self, tensor: Tensor, destination: int) -> Work:
        tensor = tensor.detach()
        what = f"send of {format_bytes(tensor.nbytes)} to {self._members[destination]}"
        return self._start(
            what,
            [tensor],
            lambda: dist.isend(tensor, group=self._process_group, group_dst=destination),
            glance=False,
        )

    def recv(self, tensor: Tensor, source: int) -> Work:
        tensor = tensor.detach()
        what = f"recv of {format_bytes(tensor.nbytes)} from {self._members[source]}"
        return self._start(
            what,
            [tensor],
            lambda: dist.irecv(tensor, group=self._process_group, group_src=source),
            glance=False,
        )

    def barrier(self) -> Work:
        token = torch.zeros(1, device=self._device)

        def arrive() -> None:
            if token.is_cuda:  # a CUDA wait only orders streams
                torch.cuda.current_stream(token.device).synchronize()

        return self._start(
            "barrier",
            [token],
            lambda: dist.all_reduce(token, group=self._process_group, async_op=True),
            arrive,
        )

    def abort(self) -> None:
        if self._aborted:
            return
        self._aborted = True
        self._notes.leave(self._members[self.rank])
        if self._device.type == "cuda":
            self._process_group.abort()  # NCCL kernels under way spin until told otherwise

    def _start(
        self,
        what: str,
        tensors: list[Tensor],
        start: Callable[[], dist.Work | None],
        finish: Callable[[], None] | None = None,
        glance: bool = True,
        copied_bytes: int = 0,
    ) -> Work:
        """`finish` runs in the wait. glance: whether the wait may look up from time to time (waiting for a
        message again is not possible).

        copied_bytes: of which the backend holds a copy on the CPU, until the wait.
        """
        on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
        if copied_bytes and on_cpu:
            self._make_room(copied_bytes)
        with self._explained(what):
            self._check_aborted(what)
            work = start()
        if work is None:
            raise CollectiveError(f"{self._members[self.rank]} takes no part in {what}.")
        started = _C10dWork(
            self, work, what, tensors, finish, glance and on_cpu, copied_bytes if on_cpu else 0
        )
        if started.copied_bytes:
            self._copied.append(started)
        return started

    def _make_room(self, copied_bytes: int) -> None:
        """For a copy of so many bytes: wait for the oldest operations, if there are too many."""
        self._copied = deque(each for each in self._copied if each.copied_bytes)
        while self._copied and sum(each.copied_bytes for each in self._copied) + copied_bytes > _COPIED_BYTES:
            self._copied.popleft().wait()

    def wait_for(self, work: dist.Work, what: str, glance: bool) -> None:
        """Wait for an operation of this group, looking at the store for a rank that left if `glance`."""
        self._activity.waits()
        self._wait(work, what, glance)
        self._activity.goes_on()

    def _wait(self, work: dist.Work, what: str, glance: bool) -> None:
        with self._explained(what):
            while glance:
                self._check_aborted(what)
                try:
                    work.wait(_GLANCE)
                    return
                except RuntimeError:
                    if work.is_completed():
                        raise  # the operation itself failed; otherwise only the glance is due
                    if left := self.who_left():
                        raise PeerLostError(
                            f"{self._members[self.rank]} lost {left}, {ABORTED}, in {what}."
                        ) from None
            self._check_aborted(what)
            work.wait()

    def _check_aborted(self, what: str) -> None:
        if self._aborted:
            raise PeerLostError(f"{self._members[self.rank]} has aborted its group: {what} cannot run.")

    def who_left(self) -> str | None:
        """The member that has aborted, if one has and its note can be read."""
        return self._notes.who_left()

    @contextmanager
    def _explained(self, what: str) -> Generator[None]:
        try:
            yield
        except RuntimeError as error:
            text = str(error).lower()
            here = self._members[self.rank]
            if any(fragment in text for fragment in _UNEQUAL):
                raise CollectiveError(
                    f"{what} on {here} met another operation or size on another rank: {_first_line(error)}"
                ) from error
            if not any(fragment in text for fragment in _LOST):
                raise
            others = [member for member in self._members if member != here]
            peer = self.who_left() or (others[0] if len(others) == 1 else f"one of {', '.join(others)}")
            how = "waited too long for" if any(fragment in text for fragment in _TIMED_OUT) else "lost"
            raise PeerLostError(f"{here} {how} {peer} in {what}: {_first_line(error)}") from error


class _C10dWork(Work):
    """copied_bytes: of which the backend holds a copy; 0 once somebody has waited for it."""

    def __init__(
        self,
        group: C10dGroup,
        work: dist.Work,
        what: str,
        tensors: list[Tensor],
        finish: Callable[[], None] | None,
        glance: bool,
        copied_bytes: int,
    ) -> None:
        self.copied_bytes = copied_bytes
        self._group, self._what, self._glance = group, what, glance
        self._work: dist.Work | None = work  # with what the backend has copied
        self._tensors = tensors  # kept alive while the backend uses their memory
        self._finish = finish

    def wait(self) -> None:
        if self._work is None:
            return
        self._group.wait_for(self._work, self._what, self._glance)
        if self._finish:
            self._finish()
        self._work = None
        self._tensors = []
        self.copied_bytes = 0

    def is_finished(self) -> bool:
        return self._work is None or self._work.is_completed()


def _first_line(error: Exception) -> str:
    """What the backend said, without the place in its source and its advice."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if line.startswith("["):
        line = line.partition("] ")[2] or line
    return line.partition(". ")[0].rstrip(".") + "."
