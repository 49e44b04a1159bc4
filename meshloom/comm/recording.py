"""A group around another one, and the one that counts its traffic: calls, bytes and blocked seconds of each kind of operation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from meshloom.comm.group import Group, ReduceOp, Work
from meshloom.core.mesh import Axis


@dataclass(frozen=True)
class Count:
    """The traffic of one rank by one kind of operation.

    calls: operations started.
    bytes: payload that this rank passed in (of a scatter, only the source does; of a receive, none).
    seconds: time for which the caller was blocked, starting and waiting; an operation may take longer.
    """

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: Count) -> Count:
        return Count(self.calls + other.calls, self.bytes + other.bytes, self.seconds + other.seconds)

    def __sub__(self, other: Count) -> Count:
        return Count(self.calls - other.calls, self.bytes - other.bytes, self.seconds - other.seconds)


class AroundGroup(Group):
    """A group that does with calls what it adds, and has the ranks of `group`."""

    def __init__(self, group: Group) -> None:
        self.group = group

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def secret(self) -> bytes:
        return self.group.secret

    def abort(self) -> None:
        self.group.abort()


class RecordedGroup(AroundGroup):
    """A wrapper of `group` that counts in `counts`, by the name of the method.

    axis: the mesh axis of the group's ranks.

    >>> from meshloom.comm.simulated import simulated_groups
    >>> import torch
    >>> recorded = RecordedGroup(simulated_groups(1)[0], "dp")
    >>> recorded.all_reduce(torch.ones(3)).wait()
    >>> recorded.counts["all_reduce"].calls, recorded.counts["all_reduce"].bytes
    (1, 12)
    """

    def __init__(self, group: Group, axis: Axis) -> None:
        super().__init__(group)
        self.axis: Axis = axis
        self.counts: dict[str, Count] = {}

    @property
    def is_in_place(self) -> bool:
        return self.group.is_in_place

    @property
    def has_streams(self) -> bool:
        return self.group.has_streams

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        return self._start("all_reduce", tensor.nbytes, lambda: self.group.all_reduce(tensor, op))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        return self._start(
            "reduce_scatter", tensor.nbytes, lambda: self.group.reduce_scatter(output, tensor, op)
        )

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        return self._start("all_gather", tensor.nbytes, lambda: self.group.all_gather(output, tensor))

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Work:
        return self._start(
            "all_to_all", tensor.nbytes, lambda: self.group.all_to_all(output, tensor, output_sizes, sizes)
        )

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, destination: int) -> Work:
        return self._start("gather", tensor.nbytes, lambda: self.group.gather(outputs, tensor, destination))

    def scatter(self, output: Tensor, tensors: Sequence[Tensor] | None, source: int) -> Work:
        passed_in = sum(tensor.nbytes for tensor in tensors or ())
        return self._start("scatter", passed_in, lambda: self.group.scatter(output, tensors, source))

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._start("broadcast", tensor.nbytes, lambda: self.group.broadcast(tensor, source))

    def send(self, tensor: Tensor, destination: int) -> Work:
        return self._start("send", tensor.nbytes, lambda: self.group.send(tensor, destination))

    def recv(self, tensor: Tensor, source: int) -> Work:
        return self._start("recv", 0, lambda: self.group.recv(tensor, source))

    def barrier(self) -> Work:
        return self._start("barrier", 0, self.group.barrier)

    def _start(self, name: str, num_bytes: int, start: Callable[[], Work]) -> Work:
        began = time.perf_counter()
        work = start()
        self._add(name, Count(1, num_bytes, time.perf_counter() - began))
        return _RecordedWork(work, lambda seconds: self._add(name, Count(seconds=seconds)))

    def _add(self, name: str, count: Count) -> None:
        self.counts[name] = self.counts.get(name, Count()) + count


class _RecordedWork(Work):
    def __init__(self, work: Work, add_seconds: Callable[[float], None]) -> None:
        self._work, self._add_seconds = work, add_seconds

    def wait(self) -> None:
        began = time.perf_counter()
        try:
            self._work.wait()
        finally:
            self._add_seconds(time.perf_counter() - began)

    def is_finished(self) -> bool:
        return self._work.is_finished()
