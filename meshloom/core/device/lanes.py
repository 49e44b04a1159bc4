"""Copies between a device and host memory, in order along a lane, while the host computes something else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

Wait = Callable[[], None]  # the host waits until a lane has come to where it was marked


class Lane(ABC):
    """A queue of copies in one direction."""

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueues a copy. Neither tensor may be touched before the lane has come there."""

    @abstractmethod
    def mark(self) -> Wait:
        """Marks what has been enqueued so far."""

    @abstractmethod
    def after_computation(self) -> None:
        """What is enqueued from now on begins after what the device has been given to compute so far."""

    @abstractmethod
    def before_computation(self) -> None:
        """What the device is given to compute from now on begins after what has been enqueued."""

    @abstractmethod
    def entered(self) -> AbstractContextManager[object]:
        """A context in which the lane is where the device computes, so that it, and nothing else, waits for works of groups."""

    @abstractmethod
    def memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """New host memory, to and from which it copies without stopping the host."""


class DirectLane(Lane):
    """Copies at once: for devices that share the host's memory and order."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def mark(self) -> Wait:
        return lambda: None

    def after_computation(self) -> None:
        pass

    def before_computation(self) -> None:
        pass

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext()

    def memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)


class CudaLane(Lane):
    """A stream of a GPU of its own. Host memory should be pinned, or copies are not asynchronous."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        with self.entered():
            target.copy_(source, non_blocking=True)
        for each in (target, source):
            if each.is_cuda:  # the allocator gives its memory to nobody before the copy
                each.record_stream(self._stream)

    def mark(self) -> Wait:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event.synchronize

    def after_computation(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def before_computation(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def entered(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)


def lane_of(device: torch.device) -> Lane:
    """A new lane between the host and a device."""
    return CudaLane(device) if device.type == "cuda" else DirectLane()
