"""A copy in host memory of what a rank writes, so that training can change the state while it is written.

held by ranks   | w: rank 0, 1 | m: rank 0 | m: rank 1 |
copied          | w w | m |  on rank 0      | w w | m |  on rank 1
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from meshloom.checkpoint.writing.parallel import DividedState, Part
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

    def take(self, num_bytes: int, *, pinned: bool) -> Tensor:
        """So many bytes, whose content is lost when others are taken."""
        if num_bytes > self._memory.nbytes or pinned != self._memory.is_pinned():
            self.release()
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        return self._memory[:num_bytes]

    def release(self) -> None:
        """Give the memory back to the system."""
        self._memory = torch.empty(0, dtype=torch.uint8)


class HostCopy:
    """The parts of `divided`, copied into `memory`. On a GPU the copies are enqueued on its current stream: what is
    enqueued there later may change the state."""

    def __init__(self, divided: DividedState, memory: CopyMemory) -> None:
        starts, position = list[int](), 0
        for _, part in divided.parts:
            starts.append(position)
            position += round_up(part.nbytes, _ALIGNED_BYTES)
        self._gpus = {part.device for _, part in divided.parts if part.device.type == "cuda"}
        taken = memory.take(position, pinned=bool(self._gpus))
        copies: list[Part] = []
        for (span, part), start in zip(divided.parts, starts, strict=True):
            copy = taken[start : start + part.nbytes].view(part.dtype)
            copy.copy_(part.detach().reshape(-1), non_blocking=True)
            copies.append((span, copy))
        self._enqueued = [torch.cuda.current_stream(gpu).record_event() for gpu in self._gpus]
        self._divided = replace(divided, parts=tuple(copies))

    def wait(self) -> DividedState:
        """What to write, once it is copied."""
        for event in self._enqueued:
            event.synchronize()
        return self._divided
