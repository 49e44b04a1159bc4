"""A copy in host memory of what a rank writes, so that training can change the state while it is written.

held by ranks   | w: rank 0, 1 | m: rank 0 | m: rank 1 |
copied          | w w | m |  on rank 0      | w w | m |  on rank 1

What lies on a disk is lent instead (`checkpoint/lending.py`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from meshloom.checkpoint.lending import Lender
from meshloom.checkpoint.writing.parallel import DividedState, Part
from meshloom.core.device.lanes import Lane, lane_of
from meshloom.core.units import round_up

_ALIGNED_BYTES = 64  # where each part begins


class CopyMemory:
    """Memory for one copy at a time, kept from one save to the next: filling memory that is new to a process takes
    several times as long."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes

    def take(self, num_bytes: int, lane: Lane) -> Tensor:
        """So many bytes to which a lane copies; their content is lost when others are taken."""
        if num_bytes > self._memory.nbytes:
            self.release()
            self._memory = lane.memory([num_bytes], torch.uint8)
        return self._memory[:num_bytes]

    def release(self) -> None:
        """Give the memory back to the system."""
        self._memory = torch.empty(0, dtype=torch.uint8)


class HostCopy:
    """The parts of `divided`, copied into `memory` or lent. The copies are enqueued: what the device is given to compute
    later may change the state. `end` is called when they are written, or will not be."""

    def __init__(self, divided: DividedState, memory: CopyMemory, lender: Lender | None = None) -> None:
        self.lender = lender
        copied = [(span, part) for span, part in divided.parts if not (lender and lender.lends(part))]
        lent = [(span, part) for span, part in divided.parts if lender and lender.lends(part)]
        starts, position = list[int](), 0
        for _, part in copied:
            starts.append(position)
            position += round_up(part.nbytes, _ALIGNED_BYTES)
        devices = sorted({part.device for _, part in copied}, key=lambda device: device.type == "cpu")
        lanes = {device: lane_of(device) for device in devices}  # a rank computes on one, beside the CPU
        taken = memory.take(position, next(iter(lanes.values()), lane_of(torch.device("cpu"))))
        for lane in lanes.values():
            lane.after_computation()
        copies: list[Part] = []
        for (span, part), start in zip(copied, starts, strict=True):
            copy = taken[start : start + part.nbytes].view(part.dtype)
            lanes[part.device].copy(copy, part.detach().reshape(-1))
            copies.append((span, copy))
        for lane in lanes.values():
            lane.before_computation()
        self._enqueued = [lane.mark() for lane in lanes.values()]
        if lender:
            spans = (span for span, _ in lent)
            copies += zip(spans, lender.lend([part for _, part in lent]), strict=True)
        self._divided = replace(divided, parts=tuple(copies))

    def wait(self) -> DividedState:
        """What to write, once it is copied."""
        for arrived in self._enqueued:
            arrived()
        return self._divided

    def end(self) -> None:
        """Nobody reads it any more."""
        if self.lender:
            self.lender.end()
