"""The group of simulated ranks in one process: the last rank to start an operation runs it for all.

Tensors of different ranks may be on different devices (one process with several GPUs). Sums are computed in
rank order on the first rank's device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshloom.comm.chunked_moves import Waits
from meshloom.comm.group import Group, ReduceOp, Work
from meshloom.comm.reductions import combine
from meshloom.comm.steps import Turns
from meshloom.core.errors import CollectiveError, PeerLostError
from meshloom.core.units import plural


def simulated_groups(size: int, turns: Turns | None = None) -> list[SimulatedGroup]:
    """One group, as each of its `size` ranks sees it.

    >>> first, second = simulated_groups(2)
    >>> tensors = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    >>> works = first.all_reduce(tensors[0]), second.all_reduce(tensors[1])
    >>> works[0].wait()
    >>> tensors[0]
    tensor([4., 6.])
    """
    rendezvous = _Rendezvous(size, turns or Turns())
    return [SimulatedGroup(rendezvous, rank) for rank in range(size)]


@dataclass(frozen=True)
class _Call:
    name: str
    arguments: tuple[Any, ...]  # equal on all ranks, or the call is a mistake
    tensors: Any  # this rank's own

    def __str__(self) -> str:
        return f"{self.name}({', '.join(str(argument) for argument in self.arguments)})"


class _Rendezvous:
    """The calls of all ranks, matched by their number."""

    def __init__(self, size: int, turns: Turns) -> None:
        self.size = size
        self.turns = turns
        self.aborted = False
        self.started = [0] * size
        self.open: dict[int, list[_Call | None]] = {}
        # (source, destination) -> sent, not yet received
        self.mail: dict[tuple[int, int], deque[Tensor]] = {}
        # posted receives: the tensor to fill, and a list that is not empty once it is filled
        self.expected: dict[tuple[int, int], deque[tuple[Tensor, list[bool]]]] = {}
        # operations of each rank, in the order of their start
        self.under_way: list[deque[_RunningSteps]] = [deque() for _ in range(size)]

    def join(self, rank: int, call: _Call, run: Callable[[list[Any]], None]) -> Work:
        """Add a rank's next call; the last rank's call runs the operation."""
        if self.aborted:
            raise PeerLostError("Another rank of this group has aborted.")
        number = self.started[rank]
        self.started[rank] += 1
        calls = self.open.setdefault(number, [None] * self.size)
        calls[rank] = call
        for other, theirs in enumerate(calls):
            if theirs and (theirs.name, theirs.arguments) != (call.name, call.arguments):
                raise CollectiveError(
                    f"Operation {number} differs: rank {other} calls {theirs}, rank {rank} calls {call}."
                )
        if None not in calls:
            with torch.no_grad():
                run([theirs.tensors for theirs in calls if theirs])
            del self.open[number]
        return _SimulatedWork(self.turns, lambda: number not in self.open, lambda: self._missing(number))

    def advance(self) -> None:
        """Advance the first operation of several messages of each rank, until none of them can advance."""
        moved = True
        with torch.no_grad():
            while moved:
                moved = False
                for line in self.under_way:
                    while line and line[0].advanced():
                        moved = True
                        if line[0].over:
                            line.popleft()

    def _missing(self, number: int) -> str:
        calls = self.open[number]
        here = next(call for call in calls if call)
        absent = [rank for rank, call in enumerate(calls) if call is None]
        return f"{here} waits for {plural('rank', len(absent))} {', '.join(map(str, absent))}, which will not come."


class _SimulatedWork(Work):
    def __init__(self, turns: Turns, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        self._turns, self._ready, self._what = turns, ready, what

    def wait(self) -> None:
        if self._ready():
            return
        if not self._turns.active:
            raise CollectiveError(self._what())
        self._turns.wait_for(self._ready, self._what)

    def is_finished(self) -> bool:
        return self._ready()


class _RunningSteps:
    def __init__(self, steps: Waits) -> None:
        self.over = False
        self._steps = steps
        self._needed: Work | None = None

    def advanced(self) -> bool:
        """Whether the operation has advanced to the next work that it needs: the previous one is over."""
        if self._needed is not None:
            if not self._needed.is_finished():
                return False
            self._needed.wait()
        self._needed = next(self._steps, None)
        self.over = self._needed is None
        return True


class SimulatedGroup(Group):
    """One rank's view of a group in this process."""

    def __init__(self, rendezvous: _Rendezvous, rank: int) -> None:
        self._rendezvous = rendezvous
        self._rank = rank

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._rendezvous.size

    @property
    def secret(self) -> bytes:
        return b""

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        def run(tensors: list[Tensor]) -> None:
            total = _reduce(tensors, op)
            for each in tensors:
                each.copy_(total)

        return self._join("all_reduce", (tuple(tensor.shape), tensor.dtype, op), tensor, run)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        def run(pairs: list[tuple[Tensor, Tensor]]) -> None:
            total = _reduce([each for _, each in pairs], op)
            for slice_, (mine, _) in zip(total.view(self.size, -1), pairs, strict=True):
                mine.view(-1).copy_(slice_)

        return self._join("reduce_scatter", (tensor.numel(), tensor.dtype, op), (output, tensor), run)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        def run(pairs: list[tuple[Tensor, Tensor]]) -> None:
            for mine, _ in pairs:
                for slice_, (_, theirs) in zip(mine.view(self.size, -1), pairs, strict=True):
                    slice_.copy_(theirs.view(-1))

        return self._join("all_gather", (tensor.numel(), tensor.dtype), (output, tensor), run)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Work:
        def run(calls: list[tuple[Tensor, Tensor, Sequence[int], Sequence[int]]]) -> None:
            sent = [theirs.split(list(counts)) for _, theirs, _, counts in calls]
            for rank, (mine, _, expected, _) in enumerate(calls):
                received = [parts[rank] for parts in sent]
                if [part.numel() for part in received] != list(expected):
                    raise CollectiveError(
                        f"all_to_all: rank {rank} expects {list(expected)} elements and is sent {[part.numel() for part in received]}."
                    )
                torch.cat([part.to(mine.device) for part in received], out=mine) if mine.numel() else None

        return self._join("all_to_all", (tensor.dtype,), (output, tensor, output_sizes, sizes), run)

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, destination: int) -> Work:
        def run(calls: list[tuple[Sequence[Tensor] | None, Tensor]]) -> None:
            for target, (_, theirs) in zip(calls[destination][0] or (), calls, strict=True):
                target.copy_(theirs)

        return self._join("gather", (tuple(tensor.shape), tensor.dtype, destination), (outputs, tensor), run)

    def scatter(self, output: Tensor, tensors: Sequence[Tensor] | None, source: int) -> Work:
        def run(calls: list[tuple[Tensor, Sequence[Tensor] | None]]) -> None:
            for (mine, _), theirs in zip(calls, calls[source][1] or (), strict=True):
                mine.copy_(theirs)

        return self._join("scatter", (tuple(output.shape), output.dtype, source), (output, tensors), run)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        def run(tensors: list[Tensor]) -> None:
            for each in tensors:
                if each is not tensors[source]:
                    each.copy_(tensors[source])

        return self._join("broadcast", (tuple(tensor.shape), tensor.dtype, source), tensor, run)

    def barrier(self) -> Work:
        return self._join("barrier", (), None, lambda _: None)

    def send(self, tensor: Tensor, destination: int) -> Work:
        self._rendezvous.mail.setdefault((self._rank, destination), deque()).append(tensor.clone())
        return _SimulatedWork(self._rendezvous.turns, lambda: True, str)

    def recv(self, tensor: Tensor, source: int) -> Work:
        mail = self._rendezvous.mail.setdefault((source, self._rank), deque())
        expected = self._rendezvous.expected.setdefault((source, self._rank), deque())
        done: list[bool] = []
        expected.append((tensor, done))

        def ready() -> bool:
            while mail and expected:
                target, received = expected.popleft()
                target.copy_(mail.popleft())
                received.append(True)
            return bool(done)

        what = f"rank {self._rank} waits for a message that rank {source} will not send."
        return _SimulatedWork(self._rendezvous.turns, ready, lambda: what)

    def start_steps(self, what: str, steps: Waits) -> Work:
        """Start an operation of several messages, which runs after earlier ones, whenever any rank waits."""
        operation = _RunningSteps(steps)
        self._rendezvous.under_way[self._rank].append(operation)

        def ready() -> bool:
            self._rendezvous.advance()
            return operation.over

        missing = f"{what} on rank {self._rank} waits for messages that will not come."
        return _SimulatedWork(self._rendezvous.turns, ready, lambda: missing)

    def abort(self) -> None:
        self._rendezvous.aborted = True

    def _join(
        self, name: str, arguments: tuple[Any, ...], tensors: Any, run: Callable[[list[Any]], None]
    ) -> Work:
        return self._rendezvous.join(self._rank, _Call(name, arguments, tensors), run)


def _reduce(tensors: Sequence[Tensor], op: ReduceOp) -> Tensor:
    total = tensors[0].clone()
    for other in tensors[1:]:
        combine(total, other.to(total.device), op)
    return total / len(tensors) if op == "avg" else total
