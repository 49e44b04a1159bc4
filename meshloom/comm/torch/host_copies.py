"""Copies in pinned host memory of tensors on a GPU, for a transport of CPU tensors.

    copies = HostCopies()
    host = copies.changed(tensor)    the tensor itself if it is on the CPU; otherwise a copy
    copies.arrive()                  copies from GPUs have finished
    ...                              the transport reads and writes `host`
    copies.bring_back()              what was written is copied to `tensor`

Copies from and to a GPU run on the stream that was current at the first copy. They read what was enqueued
there before. What is enqueued there after `bring_back`, or on a stream that calls `follow`, sees the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class HostCopies:
    """The copies of one call, whose tensors are all on one device, as torch.distributed requires."""

    def __init__(self) -> None:
        self._back: list[tuple[Tensor, Tensor]] = []  # (tensor, its copy) to copy back
        self._stream: Any = None

    def read(self, tensor: Tensor) -> Tensor:
        """`tensor` to read."""
        return tensor if tensor.is_cpu else self._empty(tensor.shape, tensor).copy_(tensor, non_blocking=True)

    def changed(self, tensor: Tensor) -> Tensor:
        """`tensor` to read and write."""
        tensor = tensor.detach()
        return tensor if tensor.is_cpu else self._returned(tensor, self.read(tensor))

    def written(self, tensor: Tensor, apart_from: Tensor | Sequence[Tensor] = ()) -> Tensor:
        """`tensor` to write only; not in memory from which `apart_from` is read."""
        tensor, others = tensor.detach(), [apart_from] if isinstance(apart_from, Tensor) else apart_from
        if tensor.is_cpu and not any(_overlap(tensor, other) for other in others):
            return tensor
        return self._returned(tensor, self._empty(tensor.shape, tensor))

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """The elements of `tensors`, concatenated and flat, to read."""
        flat, parts = self._flat(tensors)
        for part, tensor in zip(parts, tensors, strict=True):
            part.copy_(tensor.detach(), non_blocking=True)
        return flat

    def parted(self, tensors: Sequence[Tensor]) -> Tensor:
        """A flat tensor to write: the elements of `tensors`, concatenated."""
        flat, parts = self._flat(tensors)
        for part, tensor in zip(parts, tensors, strict=True):
            self._returned(tensor.detach(), part)
        return flat

    def arrive(self) -> None:
        """Wait for copies from a GPU."""
        if self._stream:
            self._stream.synchronize()

    def bring_back(self) -> None:
        """Copy what was written to where it belongs."""
        self.on_stream(lambda: [tensor.copy_(host, non_blocking=True) for tensor, host in self._back])
        self._back = []

    def follow(self) -> None:
        """Order the current stream after the copies that were brought back."""
        if self._stream:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    @property
    def device(self) -> torch.device | None:
        """The GPU of the tensors; None: the CPU."""
        return self._stream.device if self._stream else None

    def on_stream(self, act: Callable[[], object]) -> None:
        """Call `act` while this call's stream is current."""
        if self._stream:
            with torch.cuda.stream(self._stream):
                act()
        else:
            act()

    def _empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        if like.is_cuda and self._stream is None:
            self._stream = torch.cuda.current_stream(like.device)
        return torch.empty(shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)

    def _flat(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """A flat tensor for the elements of `tensors`, and its views of their shapes."""
        sizes = [each.numel() for each in tensors]
        flat = self._empty([sum(sizes)], tensors[0])
        return flat, [part.view(each.shape) for part, each in zip(flat.split(sizes), tensors, strict=True)]

    def _returned(self, tensor: Tensor, host: Tensor) -> Tensor:
        self._back.append((tensor, host))
        return host


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether both may share elements of one storage; disjoint parts are recognized if contiguous."""
    if one.device != other.device or one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    first, second = sorted((one, other), key=Tensor.data_ptr)
    apart = second.data_ptr() >= first.data_ptr() + first.nbytes
    return not (apart and one.is_contiguous() and other.is_contiguous())
