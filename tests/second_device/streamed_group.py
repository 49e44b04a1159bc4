"""A group whose operations are over no sooner than somebody waits for them, as on a stream of their own.

    all_reduce(x)    x is NaN from here                       until its `wait`
    recv(x)          x is NaN from here                       until its `wait`
    send(x)          x is not written                         until its `wait`

So who reads a result too early computes with NaN, and who writes an operand too early is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshloom.comm.group import Group, ReduceOp, Work
from meshloom.comm.recording import AroundGroup
from tests.second_device.device import SecondDevice


class StreamedGroup(AroundGroup):
    """In place of `group`, of simulated ranks."""

    has_streams = True

    def __init__(self, group: Group, device: SecondDevice) -> None:
        super().__init__(group)
        self._device = device

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        return self._start([tensor], [tensor], lambda own: self.group.all_reduce(own[0], op))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        return self._start([tensor], [output], lambda own: self.group.reduce_scatter(own[1], own[0], op))

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        return self._start([tensor], [output], lambda own: self.group.all_gather(own[1], own[0]))

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Work:
        return self._start(
            [tensor], [output], lambda own: self.group.all_to_all(own[1], own[0], output_sizes, sizes)
        )

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, destination: int) -> Work:
        targets = list(outputs or ())
        return self._start(
            [tensor],
            targets,
            lambda own: self.group.gather(own[1:] if outputs else None, own[0], destination),
        )

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        if self.rank == source:
            return self._start([tensor], [], lambda own: self.group.broadcast(own[0], source))
        return self._start([], [tensor], lambda own: self.group.broadcast(own[0], source))

    def send(self, tensor: Tensor, destination: int) -> Work:
        return self._start([tensor], [], lambda own: self.group.send(own[0], destination))

    def recv(self, tensor: Tensor, source: int) -> Work:
        return self._start([], [tensor], lambda own: self.group.recv(own[0], source))

    def barrier(self) -> Work:
        return self.group.barrier()

    def _start(
        self, read: Sequence[Tensor], written: Sequence[Tensor], start: Callable[[list[Tensor]], Work]
    ) -> Work:
        """start: given copies of what is read, and memory for what is written; of what is both, one."""
        with torch.no_grad():
            copies = {id(each): each.detach().clone() for each in (*read, *written)}
            for each in written:
                detached(each).fill_(float("nan") if each.is_floating_point() or each.is_complex() else 85)
        own = [copies[each] for each in dict.fromkeys(map(id, (*read, *written)))]
        return _StreamedWork(self._device, start(own), read, written, copies)


class _StreamedWork(Work):
    def __init__(
        self, device: SecondDevice, work: Work, read: Sequence[Tensor], written: Sequence[Tensor], copies: dict[int, Tensor],
    ) -> None:  # fmt: skip
        self._device, self._work, self._copies = device, work, copies
        self._written: Sequence[Tensor] = written
        self._read = [(each, each._version) for each in read]
        self._position = device.position

    def wait(self) -> None:
        self._work.wait()
        for each, version in self._read:
            if each._version != version:
                raise AssertionError(
                    f"an operand {list(each.shape)} was written before its operation was over"
                )
        self._read = []
        with torch.no_grad():
            for each in self._written:
                detached(each).copy_(self._copies[id(each)])
        self._written = []
        if self._device.lane is not None:
            self._device.lane.after(self._position)

    def is_finished(self) -> bool:
        return self._work.is_finished()


def detached(tensor: Tensor) -> Any:
    """The same memory, whose writes do not count as the tensor's owner's."""
    return tensor.data
