"""The group of simulated ranks in one process, whose operations finish as late as the contract of groups permits.

An operation reads its inputs when the first rank waits for it and fills a rank's outputs when that rank waits. Until
then outputs hold NaN, but for the messages of a collective that is made of some. So whoever reads an
output too early, changes an input too early or never waits gets other values here, in every run, and not just now and
then on a fast network. So does who waits for an output that a later operation, which is under way, writes too.

Tensors of different ranks may be on different devices (one process with several GPUs). Sums are computed in
rank order on the first rank's device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshloom.comm.group import Group, ReduceOp, Work
from meshloom.comm.reductions import combine
from meshloom.comm.simulated_calls import (
    Run,
    SimulatedCall,
    SimulatedMail,
    SimulatedOperation,
    WritingWork,
    poison,
    poison_apart_from,
)
from meshloom.comm.turns import wait_until
from meshloom.core.errors import CollectiveError, PeerLostError


def simulated_groups(size: int, *, of_a_host: bool = False) -> list[SimulatedGroup]:
    """One group, as each of its `size` ranks sees it. of_a_host: its ranks can share memory.

    >>> first, second = simulated_groups(2)
    >>> tensors = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    >>> works = first.all_reduce(tensors[0]), second.all_reduce(tensors[1])
    >>> works[0].wait()
    >>> tensors[0]
    tensor([4., 6.])
    """
    rendezvous, kind = _Rendezvous(size), SimulatedHost if of_a_host else SimulatedGroup
    return [kind(rendezvous, rank) for rank in range(size)]


class _Rendezvous:
    """The calls of all ranks, matched by their number."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.aborted = False
        self.started = [0] * size
        # operations that are not computed yet, by number
        self.open: dict[int, SimulatedOperation] = {}
        # (source, destination) -> messages
        self.mail: dict[tuple[int, int], SimulatedMail] = {}
        # works of each rank that are not waited for, of operations with outputs, in the order of their start
        self.writing: list[list[WritingWork]] = [[] for _ in range(size)]
        self.windows: list[SimulatedWindow] = []

    def join(self, rank: int, call: SimulatedCall, run: Run) -> Work:
        """Add a rank's next call."""
        if self.aborted:
            raise PeerLostError("Another rank of this group has aborted.")
        number = self.started[rank]
        self.started[rank] += 1
        operation = self.open.setdefault(number, SimulatedOperation(self.size))
        operation.calls[rank] = call
        for other, theirs in enumerate(operation.calls):
            if theirs and (theirs.name, theirs.arguments) != (call.name, call.arguments):
                raise CollectiveError(
                    f"Operation {number} differs: rank {other} calls {theirs}, rank {rank} calls {call}."
                )
        if None not in operation.calls:
            operation.run = run

        def deliver() -> None:
            self._compute_up_to(number)
            operation.deliver(rank)

        return _SimulatedWork(lambda: operation.started, operation.missing, deliver)

    def _compute_up_to(self, number: int) -> None:
        """Compute the operations up to one that all ranks have started, first in, first out."""
        for each in sorted(self.open):
            if each > number:
                break
            self.open.pop(each).compute()


class _SimulatedWork(Work):
    def __init__(
        self, ready: Callable[[], bool], what: Callable[[], str], deliver: Callable[[], None]
    ) -> None:
        self._ready, self._what = ready, what
        self._deliver: Callable[[], None] | None = deliver

    def wait(self) -> None:
        if self._deliver is None:
            return
        wait_until(self._ready, self._what)
        with torch.no_grad():
            self._deliver()
        self._deliver = None  # with the tensors that it holds

    def is_finished(self) -> bool:
        return self._deliver is None or self._ready()


class _LaterWork(Work):
    """An operation that runs when its rank waits for it, or for a later one. line: those of its rank, in order."""

    def __init__(self, line: deque[_LaterWork], run: Callable[[], None]) -> None:
        self._line, self._run = line, run
        line.append(self)

    def wait(self) -> None:
        while self in self._line:
            each = self._line[0]
            with torch.no_grad():
                each._run()
            self._line.popleft()

    def is_finished(self) -> bool:
        return self not in self._line


class SimulatedGroup(Group):
    """One rank's view of a group in this process."""

    def __init__(self, rendezvous: _Rendezvous, rank: int) -> None:
        self._rendezvous = rendezvous
        self.rank, self.size = rank, rendezvous.size
        self._later: deque[_LaterWork] = deque()

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        def run(tensors: list[Tensor]) -> Callable[[int], None]:
            total, outputs = _reduce(tensors, op), dict(enumerate(tensors))
            return lambda rank: _fill(outputs.pop(rank), total)

        return self._join("all_reduce", (tuple(tensor.shape), tensor.dtype, op), tensor, run)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        def run(pairs: list[tuple[Tensor, Tensor]]) -> Callable[[int], None]:
            slices = _reduce([each for _, each in pairs], op).view(self.size, -1)
            outputs = {rank: output for rank, (output, _) in enumerate(pairs)}
            return lambda rank: _fill(outputs.pop(rank).view(-1), slices[rank])

        return self._join("reduce_scatter", (tensor.numel(), tensor.dtype, op), (output, tensor), run, output)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        def run(pairs: list[tuple[Tensor, Tensor]]) -> Callable[[int], None]:
            slices = [theirs.flatten().clone() for _, theirs in pairs]
            outputs = {rank: output for rank, (output, _) in enumerate(pairs)}

            def deliver(rank: int) -> None:
                for target, slice_ in zip(outputs.pop(rank).view(self.size, -1), slices, strict=True):
                    target.copy_(slice_)

            return deliver

        return self._join("all_gather", (tensor.numel(), tensor.dtype), (output, tensor), run, output)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Work:
        def run(calls: list[tuple[Tensor, Tensor, Sequence[int], Sequence[int]]]) -> Callable[[int], None]:
            sent = [theirs.clone().split(list(counts)) for _, theirs, _, counts in calls]
            received = [[parts[rank] for parts in sent] for rank in range(self.size)]
            for rank, (_, _, expected, _) in enumerate(calls):
                arriving = [part.numel() for part in received[rank]]
                if arriving != list(expected):
                    raise CollectiveError(
                        f"all_to_all: rank {rank} expects {list(expected)} elements and is sent {arriving}."
                    )

            outputs = {rank: output for rank, (output, *_) in enumerate(calls)}

            def deliver(rank: int) -> None:
                mine = outputs.pop(rank)
                torch.cat(
                    [part.to(mine.device) for part in received[rank]], out=mine
                ) if mine.numel() else None

            return deliver

        return self._join("all_to_all", (tensor.dtype,), (output, tensor, output_sizes, sizes), run, output)

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, destination: int) -> Work:
        def run(calls: list[tuple[Sequence[Tensor] | None, Tensor]]) -> Callable[[int], None]:
            gathered, targets = [theirs.clone() for _, theirs in calls], calls[destination][0] or ()

            def deliver(rank: int) -> None:
                for target, each in zip(targets, gathered, strict=True) if rank == destination else ():
                    target.copy_(each)

            return deliver

        early = outputs or () if self.rank == destination else ()
        return self._join(
            "gather", (tuple(tensor.shape), tensor.dtype, destination), (outputs, tensor), run, *early
        )

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        def run(tensors: list[Tensor]) -> Callable[[int], None]:
            sent = tensors[source].clone()
            outputs = {rank: output for rank, output in enumerate(tensors) if rank != source}
            return lambda rank: None if rank == source else _fill(outputs.pop(rank), sent)

        early = () if self.rank == source else (tensor,)
        return self._join("broadcast", (tuple(tensor.shape), tensor.dtype, source), tensor, run, *early)

    def barrier(self) -> Work:
        return self._join("barrier", (), None, lambda _: lambda _: None)

    def send(self, tensor: Tensor, destination: int) -> Work:
        mail = self._rendezvous.mail.setdefault((self.rank, destination), SimulatedMail())
        number = mail.send(tensor)
        return _SimulatedWork(lambda: True, str, lambda: mail.keep(number))

    def recv(self, tensor: Tensor, source: int) -> Work:
        mail = self._rendezvous.mail.setdefault((source, self.rank), SimulatedMail())
        number = mail.receive()
        if not self._later:  # else it may hold what is still to be sent, before what arrives was computed
            poison(tensor)
        what = f"rank {self.rank} waits for a message that rank {source} will not send."
        return _SimulatedWork(
            lambda: mail.has(number),
            lambda: what,
            lambda: _fill(tensor, mail.take(number)),
        )

    def start_later(self, what: str, run: Callable[[], None]) -> Work:
        """Start an operation of several messages, which runs after earlier ones when this rank waits for it."""
        return _LaterWork(self._later, run)

    def abort(self) -> None:
        self._rendezvous.aborted = True

    def _join(self, name: str, arguments: tuple[Any, ...], tensors: Any, run: Run, *outputs: Tensor) -> Work:
        """outputs: of this rank, that hold nothing until it has waited."""
        work = self._rendezvous.join(self.rank, SimulatedCall(name, arguments, tensors), run)
        poison_apart_from(tensors, outputs)
        return WritingWork(work, outputs, self._rendezvous.writing[self.rank]) if outputs else work


def _fill(output: Tensor, value: Tensor) -> None:
    output.copy_(value)


class SimulatedHost(SimulatedGroup):
    """One rank's view of a group whose ranks can share memory (`comm/windows.py` `Windows`)."""

    def __init__(self, rendezvous: _Rendezvous, rank: int) -> None:
        super().__init__(rendezvous, rank)
        self._num_windows = 0  # of this rank so far

    def window(self, num_bytes: int, owner: int | None = None) -> SimulatedWindow:
        """As of `Windows`. The rank that comes first allocates."""
        windows = self._rendezvous.windows
        if self._num_windows == len(windows):
            windows.append(
                SimulatedWindow([num_bytes if owner in (None, rank) else 0 for rank in range(self.size)])
            )
        self._num_windows += 1
        return windows[self._num_windows - 1]


class SimulatedWindow:
    """Memory of all ranks, `sizes` bytes each."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._memory = [torch.zeros(size, dtype=torch.uint8) for size in sizes]

    def of(self, rank: int) -> Tensor:
        """As of `Window`."""
        return self._memory[rank]


def _reduce(tensors: Sequence[Tensor], op: ReduceOp) -> Tensor:
    total = tensors[0].clone()
    for other in tensors[1:]:
        combine(total, other.to(total.device), op)
    return total / len(tensors) if op == "avg" else total
