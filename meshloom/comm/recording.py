"""A group around another one, and the one that counts its traffic (calls, bytes and blocked seconds of each kind of operation) and notes
when its rank waits."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from meshloom.comm.group import Group, ReduceOp, Work
from meshloom.comm.liveness.activity import Activity
from meshloom.core.mesh import Axis


@dataclass
class Count:
    """The traffic of one rank by one kind of operation.

    calls: operations started.
    bytes: payload that this rank passed in (of a receive, none).
    seconds: time for which the caller was blocked, starting and waiting; an operation may take longer.
    """

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: Count) -> Count:
        return Count(self.calls + other.calls, self.bytes + other.bytes, self.seconds + other.seconds)


class AroundGroup(Group):
    """A group that does with calls what it adds, and has the ranks of `group`."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rank, self.size, self.secret = group.rank, group.size, group.secret

    def abort(self) -> None:
        self.group.abort()


class RecordedGroup(AroundGroup):
    """A wrapper of `group` that counts in `counts`, by the name of the method.

    axis: the mesh axis of the group's ranks, "" if it is of no axis. activity: where this rank notes that it waits. After a wait
        that failed it still says so.

    >>> from meshloom.comm.simulated import simulated_groups
    >>> import torch
    >>> recorded = RecordedGroup(simulated_groups(1)[0], "dp")
    >>> recorded.all_reduce(torch.ones(3)).wait()
    >>> recorded.counts["all_reduce"].calls, recorded.counts["all_reduce"].bytes
    (1, 12)
    """

    def __init__(self, group: Group, axis: Axis | Literal[""], activity: Activity | None = None) -> None:
        super().__init__(group)
        self.axis = axis
        self._activity = activity or Activity()
        self.is_in_place, self.has_streams = group.is_in_place, group.has_streams
        self.counts: dict[str, Count] = defaultdict(Count)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        return self._start("all_reduce", tensor.nbytes, tensor, op)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        return self._start("reduce_scatter", tensor.nbytes, output, tensor, op)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        return self._start("all_gather", tensor.nbytes, output, tensor)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Work:
        return self._start("all_to_all", tensor.nbytes, output, tensor, output_sizes, sizes)

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, destination: int) -> Work:
        return self._start("gather", tensor.nbytes, outputs, tensor, destination)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._start("broadcast", tensor.nbytes, tensor, source)

    def send(self, tensor: Tensor, destination: int) -> Work:
        return self._start("send", tensor.nbytes, tensor, destination)

    def recv(self, tensor: Tensor, source: int) -> Work:
        return self._start("recv", 0, tensor, source)

    def barrier(self) -> Work:
        return self._start("barrier", 0)

    def _start(self, name: str, num_bytes: int, *arguments: Any) -> Work:
        began = time.perf_counter()
        work: Work = getattr(self.group, name)(*arguments)
        count = self.counts[name]
        count.calls += 1
        count.bytes += num_bytes
        count.seconds += time.perf_counter() - began
        return _RecordedWork(work, count, self._activity)


class _RecordedWork(Work):
    def __init__(self, work: Work, count: Count, activity: Activity) -> None:
        self._work, self._count, self._activity = work, count, activity

    def wait(self) -> None:
        self._activity.waits()
        began = time.perf_counter()
        try:
            self._work.wait()
        finally:
            self._count.seconds += time.perf_counter() - began
        self._activity.goes_on()

    def is_finished(self) -> bool:
        return self._work.is_finished()
