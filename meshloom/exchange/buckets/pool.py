"""A piece of memory of which flat tensors are taken and given back."""

from __future__ import annotations

from torch import Tensor

from meshloom.comm.windows import Extent, window_bytes


class Pool:
    """memory: uint8 [num_bytes], on the device of all that is taken. Tensors begin at multiples of 64 bytes."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._taken: dict[int, int] = {}  # first byte -> the byte after the last

    def take(self, extent: Extent) -> Tensor | None:
        """A flat tensor [num_elements] of any values; None if no gap is large enough."""
        num_bytes = extent.num_elements * extent.dtype.itemsize
        first = 0
        for start, stop in sorted(self._taken.items()):
            if start - first >= num_bytes:
                break
            first = stop
        if first + num_bytes > self._memory.numel():
            return None
        self._taken[first] = first + window_bytes([extent])
        return self._memory[first : first + num_bytes].view(extent.dtype)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor was taken from here."""
        return tensor.data_ptr() - self._memory.data_ptr() in self._taken

    def give(self, tensor: Tensor) -> None:
        """Takes back a tensor; one that lies elsewhere is ignored."""
        self._taken.pop(tensor.data_ptr() - self._memory.data_ptr(), None)

    def clear(self) -> None:
        """Takes back all tensors."""
        self._taken.clear()
