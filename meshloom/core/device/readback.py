"""Values that a device computes and the host reads: sent as soon as they are known, read once they are needed.

    device   forward | loss sums | backward ................ | update
    lane                         | copy |
    host     ....... queues the backward ...... read, queues the update

`tensor.item()` would wait for all that was queued, here for the backward: the device would have nothing to do until the
host has queued more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshloom.core.device.lanes import Lane, lane_of


class Readbacks:
    """Readbacks of one device's values, in their order."""

    def __init__(self, device: torch.device) -> None:
        self._direct = device.type == "cpu"
        self._lane = lane_of(device)

    @property
    def lane(self) -> Lane:
        return self._lane

    def read(self, tensor: Tensor, *, ready: bool = False) -> Readback:
        """Sends the values of a tensor, which may not change until they are read.

        ready: the lane is behind what computes them already; otherwise it waits for all that the device has been
            given so far.
        """
        if self._direct:
            return Readback(tensor, None)
        if not ready:
            self._lane.after_computation()
        host = self._lane.memory(tensor.shape, tensor.dtype)
        self._lane.copy(host, tensor.detach())
        return Readback(host, self._lane.mark())


class Readback:
    """Values that are on their way to the host. wait: until they are there; None: they are."""

    def __init__(self, host: Tensor, wait: Callable[[], None] | None) -> None:
        self._host, self._wait = host, wait

    @property
    def waits(self) -> bool:
        """Whether `values` may wait for the device."""
        return self._wait is not None

    def values(self) -> Tensor:
        """On the CPU."""
        if self._wait is not None:
            self._wait()
            self._wait = None
        return self._host


def on_device(values: list[float] | list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of a few numbers of the host's, for which the host does not wait (`torch.tensor(..., device=)` does)."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
