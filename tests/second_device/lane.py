"""A lane of the second device, which copies as late as it may, and says when the host waits."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from meshloom.core.device.lanes import Lane, Wait
from tests.second_device.device import SecondDevice


class RecordedLane(Lane):
    """Copies when somebody waits for it, and not before; then the host has come to where its copies were enqueued."""

    def __init__(self, device: SecondDevice) -> None:
        self._device = device
        self._after = 0  # it begins after this operator of the device
        self._queue: list[tuple[Tensor, Tensor, int]] = []
        self._done = self._reached = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._queue.append((target, source, self._after))

    def mark(self) -> Wait:
        here = len(self._queue)
        return lambda: self._wait(here)

    def after_computation(self) -> None:
        self.after(self._device.position)

    def before_computation(self) -> None:
        self._run(len(self._queue))

    @contextmanager
    def entered(self) -> Generator[None]:
        outside, self._device.lane = self._device.lane, self
        try:
            yield
        finally:
            self._device.lane = outside

    def after(self, position: int) -> None:
        """What is enqueued from now on begins after this operator of the device."""
        self._after = max(self._after, position)

    def memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        made = torch.empty(shape, dtype=dtype)
        self._device.pinned.add(made.untyped_storage().data_ptr())
        return made

    def _wait(self, until: int) -> None:
        after = max((after for *_, after in self._queue[self._done : until]), default=0)
        self._run(until)
        # Ranks share the device: what one's host knows of this step, another's does not.
        known = self._device.reached if after <= self._device.step_began else self._reached
        if after > known:
            self._reached = after
            self._device.wait("a lane", after)

    def _run(self, until: int) -> None:
        for target, source, _ in self._queue[self._done : until]:
            target.copy_(source, non_blocking=True)
        self._done = max(self._done, until)
