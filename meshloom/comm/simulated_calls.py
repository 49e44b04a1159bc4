"""Operations of simulated ranks that have been started and not delivered, and the values that stand for what has not arrived."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshloom.comm.group import Work
from meshloom.core.errors import CollectiveError
from meshloom.core.units import plural


@dataclass(frozen=True)
class SimulatedCall:
    name: str
    arguments: tuple[Any, ...]  # equal on all ranks, or the call is a mistake
    tensors: Any  # this rank's own

    def __str__(self) -> str:
        return f"{self.name}({', '.join(str(argument) for argument in self.arguments)})"


# Computes an operation from what all ranks passed, and changes none of it; fills one rank's outputs when called with it.
Run = Callable[[list[Any]], Callable[[int], None]]


class SimulatedOperation:
    """A collective: started by one rank after another, computed once, delivered to each rank when that rank waits."""

    def __init__(self, size: int) -> None:
        self.calls: list[SimulatedCall | None] = [None] * size
        self.run: Run | None = None  # of the last rank to start it
        self._deliver: Callable[[int], None] | None = None
        self._waited = 0  # ranks that have
        self._error: Exception | None = None

    @property
    def started(self) -> bool:
        """Whether all ranks have started it."""
        return self.run is not None or self._deliver is not None or self._error is not None

    def compute(self) -> None:
        """Read all ranks' inputs."""
        assert self.run is not None
        try:
            self._deliver = self.run([call.tensors for call in self.calls if call])
        except CollectiveError as error:  # of every rank
            self._error = error
        self.calls, self.run = [None] * len(self.calls), None  # with inputs that are no longer needed

    def deliver(self, rank: int) -> None:
        """Fill the outputs of a rank."""
        if self._error:
            raise self._error
        assert self._deliver is not None
        self._deliver(rank)
        self._waited += 1
        if self._waited == len(self.calls):
            self._deliver = _nothing

    def missing(self) -> str:
        """What a rank says that waits in vain."""
        here = next(call for call in self.calls if call)
        absent = [rank for rank, call in enumerate(self.calls) if call is None]
        return f"{here} waits for {plural('rank', len(absent))} {', '.join(map(str, absent))}, which will not come."


def _nothing(_: int) -> None:
    pass


class SimulatedMail:
    """Messages from one rank to another, in order: numbers of those sent and of those received."""

    def __init__(self) -> None:
        self.num_sent = self.num_received = 0
        self._messages: dict[int, Tensor] = {}

    def send(self, tensor: Tensor) -> int:
        """The message's number. It is read when either of the two waits."""
        self._messages[self.num_sent] = tensor
        self.num_sent += 1
        return self.num_sent - 1

    def keep(self, number: int) -> None:
        """Read a message now, if nobody has: its sender may change it from now on."""
        if number in self._messages:
            self._messages[number] = self._messages[number].clone()

    def receive(self) -> int:
        """The number of the next message to receive."""
        self.num_received += 1
        return self.num_received - 1

    def take(self, number: int) -> Tensor:
        return self._messages.pop(number)

    def has(self, number: int) -> bool:
        return number in self._messages


def poison_apart_from(inputs: Any, outputs: Sequence[Tensor]) -> None:
    """Poison a call's `outputs` that have no memory in common with its other tensors, which are all in `inputs`."""
    read = {_memory(each) for each in _flat(inputs) if not any(each is output for output in outputs)}
    for output in outputs:
        if _memory(output) not in read:
            poison(output)


def poison(tensor: Tensor) -> None:
    """Fill a tensor with values that nobody sends: NaN, or the largest integer.

    >>> tensor = torch.zeros(2)
    >>> poison(tensor)
    >>> tensor
    tensor([nan, nan])
    """
    with torch.no_grad():
        if tensor.dtype == torch.bool:
            tensor.fill_(True)
        else:
            is_integer = not (tensor.is_floating_point() or tensor.is_complex())
            tensor.fill_(torch.iinfo(tensor.dtype).max if is_integer else torch.nan)


def _flat(tensors: Any) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        return [tensors]
    return [each for part in tensors for each in _flat(part)] if isinstance(tensors, tuple | list) else []


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class WritingWork(Work):
    """`work` of an operation that writes `outputs`. others: those of the same rank that are not waited for, in the order of their
    start.

    What is read after waiting is NaN where a later one writes as well: it may have done so already.
    """

    def __init__(self, work: Work, outputs: Sequence[Tensor], others: list[WritingWork]) -> None:
        self._work, self._others = work, others
        self._spans = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in outputs]  # contiguous
        self._outputs = [weakref.ref(each) for each in outputs]
        others.append(self)

    def wait(self) -> None:
        self._work.wait()
        if self not in self._others:
            return
        place = self._others.index(self)
        for later in self._others[place + 1 :]:
            if any(_overlap(one, other) for one in self._spans for other in later._spans):
                for output in later._outputs:
                    if (tensor := output()) is not None:
                        poison(tensor)
        del self._others[place]

    def is_finished(self) -> bool:
        return self._work.is_finished()


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return max(one[0], other[0]) < min(one[1], other[1])
