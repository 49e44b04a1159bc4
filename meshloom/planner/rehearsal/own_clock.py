"""A clock that runs while a rank computes, and groups that stop it while they are busy.

Rehearsed ranks share one process and take turns, so wall-clock time says nothing about any of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshloom.comm.group import Group, ReduceOp, Work
from meshloom.comm.recording import AroundGroup
from meshloom.comm.windows import Window
from meshloom.core.mesh import Axis
from meshloom.planner.measure.timing import now
from meshloom.planner.rehearsal.rehearsal import RehearsedCall


class OwnClock:
    """Seconds that the thread which called `begin` computed, without those between `stop` and `go`.

    On a CPU time is the thread's: neither other threads nor other programs on the machine advance it. device:
    on which it computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._now: Callable[[], float] = time.thread_time if device.type == "cpu" else lambda: now(device)
        self._passed = 0.0
        self._since: float | None = None
        self.calls: list[RehearsedCall] = []

    def begin(self) -> None:
        """Resets it to 0, without calls."""
        self.calls = []
        self._passed = 0.0
        self._since = self._now()

    def stop(self) -> None:
        """Stops it, if it runs."""
        if self._since is not None:
            self._passed += self._now() - self._since
            self._since = None

    def go(self) -> None:
        """Continues it."""
        self._since = self._now()

    @property
    def seconds(self) -> float:
        """Seconds since `begin`."""
        return self._passed + (self._now() - self._since if self._since is not None else 0.0)

    def nanoseconds(self) -> int:
        """The same in nanoseconds, for a `Recorder`."""
        return round(self.seconds * 1e9)


class InProcessWindow:
    """A window of ranks in one process."""

    def __init__(self, memory: Sequence[Tensor]) -> None:
        self._memory = tuple(memory)

    def of(self, rank: int) -> Tensor:
        """That rank's bytes."""
        return self._memory[rank]


class CommonMemory:
    """The windows of one group of ranks in one process: the first rank to request a window creates it, the
    others get it, in the same order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._made: list[InProcessWindow] = []
        self._taken = [0] * size
        self._addresses: list[tuple[int, int]] = []

    def take(self, rank: int, num_bytes: int, owner: int | None) -> InProcessWindow:
        """The next window of this rank."""
        if self._taken[rank] == len(self._made):
            sizes = [num_bytes if owner in (None, each) else 0 for each in range(self._size)]
            memory = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
            self._made.append(InProcessWindow(memory))
            self._addresses += [
                (each.data_ptr(), each.data_ptr() + each.nbytes) for each in memory if each.nbytes
            ]
        self._taken[rank] += 1
        return self._made[self._taken[rank] - 1]

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in one of the windows."""
        return any(first <= tensor.data_ptr() < last for first, last in self._addresses)


class RehearsedGroup(AroundGroup):
    """Does what `group` does while the rank's own clock is stopped, and records the calls. common: set if its
    ranks can share memory. members: the ranks that it connects."""

    def __init__(
        self, group: Group, axis: Axis, clock: OwnClock, common: CommonMemory | None = None, members: Sequence[int] = ()
    ) -> None:  # fmt: skip
        super().__init__(group)
        self.secret = b""
        self._clock, self._common = clock, common
        self._members = tuple(members)
        self._axis: Axis = axis
        if common is not None:
            self.window = self._window  # with it the group is one of `Windows`

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        return self._run("all_reduce", tensor, lambda: self.group.all_reduce(tensor, op))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        return self._run("reduce_scatter", tensor, lambda: self.group.reduce_scatter(output, tensor, op))

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        return self._run("all_gather", tensor, lambda: self.group.all_gather(output, tensor))

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Work:
        return self._run(
            "all_to_all", tensor, lambda: self.group.all_to_all(output, tensor, output_sizes, sizes)
        )

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, destination: int) -> Work:
        return self._run("gather", tensor, lambda: self.group.gather(outputs, tensor, destination))

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._run("broadcast", tensor, lambda: self.group.broadcast(tensor, source))

    def send(self, tensor: Tensor, destination: int) -> Work:
        return self._run("send", tensor, lambda: self.group.send(tensor, destination))

    def recv(self, tensor: Tensor, source: int) -> Work:
        return self._run("recv", None, lambda: self.group.recv(tensor, source))

    def barrier(self) -> Work:
        return self._run("barrier", None, self.group.barrier)

    def _window(self, num_bytes: int, owner: int | None = None) -> Window:
        assert self._common is not None
        return self._common.take(self.rank, num_bytes, owner)

    def _run(self, kind: str, tensor: Tensor | None, start: Callable[[], Work]) -> Work:
        self._clock.stop()
        in_place = tensor is not None and self._common is not None and self._common.holds(tensor)
        num_bytes = tensor.nbytes if tensor is not None else 0
        self._clock.calls.append(
            RehearsedCall(
                axis=self._axis,
                kind=kind,
                num_bytes=num_bytes,
                ranks=self.size,
                at=self._clock.seconds,
                in_place=in_place,
                members=self._members,
            )
        )
        try:
            return _Paused(start(), self._clock)
        finally:
            self._clock.go()


class _Paused(Work):
    """Waits while the clock is stopped."""

    def __init__(self, work: Work, clock: OwnClock) -> None:
        self._work, self._clock = work, clock

    def wait(self) -> None:
        self._clock.stop()
        try:
            self._work.wait()
        finally:
            self._clock.go()

    def is_finished(self) -> bool:
        return self._work.is_finished()
