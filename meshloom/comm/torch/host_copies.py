"""Host tensors in the place of tensors on a GPU, for a transport that knows no others.

    near = StandIns()
    host = near.changed(tensor)      the tensor itself, if it is on the CPU; else a copy in pinned memory
    near.arrive()                    what was copied from GPUs is there
    ...                              the transport reads and writes `host`
    near.bring_back()                what was written goes where it belongs

Copies from and to a GPU run on the stream that was current when the stand-in was made: what was enqueued
there before is read, and what is enqueued there after `bring_back`, or on a stream that calls `follow`, finds
the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class StandIns:
    """Those of one call. All its tensors lie on one device, as torch.distributed demands."""

    def __init__(self) -> None:
        self._back: list[tuple[Tensor, Tensor]] = []  # where it belongs, and what was written in its place
        self._stream: Any = None

    def read(self, tensor: Tensor) -> Tensor:
        """`tensor`, to be read."""
        return tensor if tensor.is_cpu else self._empty(tensor.shape, tensor).copy_(tensor, non_blocking=True)

    def changed(self, tensor: Tensor) -> Tensor:
        """`tensor`, to be read and written."""
        tensor = tensor.detach()
        return tensor if tensor.is_cpu else self._returned(tensor, self.read(tensor))

    def written(self, tensor: Tensor, apart_from: Tensor | Sequence[Tensor] = ()) -> Tensor:
        """`tensor`, to be written only; not in memory that `apart_from` is read from."""
        tensor, others = tensor.detach(), [apart_from] if isinstance(apart_from, Tensor) else apart_from
        if tensor.is_cpu and not any(_overlap(tensor, other) for other in others):
            return tensor
        return self._returned(tensor, self._empty(tensor.shape, tensor))

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """All elements of `tensors` behind each other, to be read: flat."""
        flat = self._empty([sum(each.numel() for each in tensors)], tensors[0])
        for part, tensor in zip(flat.split([each.numel() for each in tensors]), tensors, strict=True):
            part.view(tensor.shape).copy_(tensor.detach(), non_blocking=True)
        return flat

    def parted(self, tensors: Sequence[Tensor]) -> Tensor:
        """Flat, to be written: what will be all elements of `tensors` behind each other."""
        flat = self._empty([sum(each.numel() for each in tensors)], tensors[0])
        for part, tensor in zip(flat.split([each.numel() for each in tensors]), tensors, strict=True):
            self._returned(tensor.detach(), part.view(tensor.shape))
        return flat

    def arrive(self) -> None:
        """Wait for the copies from a GPU."""
        if self._stream:
            self._stream.synchronize()

    def bring_back(self) -> None:
        """Copy what was written."""
        self.on_stream(lambda: [tensor.copy_(host, non_blocking=True) for tensor, host in self._back])
        self._back = []

    def follow(self) -> None:
        """What the current stream runs next comes after what was brought back."""
        if self._stream:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    @property
    def device(self) -> torch.device | None:
        """The GPU whose tensors take part, if there is one."""
        return self._stream.device if self._stream else None

    def on_stream(self, act: Callable[[], object]) -> None:
        """`act()` while this call's stream is current."""
        if self._stream:
            with torch.cuda.stream(self._stream):
                act()
        else:
            act()

    def _empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        if like.is_cuda and self._stream is None:
            self._stream = torch.cuda.current_stream(like.device)
        return torch.empty(shape, dtype=like.dtype, pin_memory=like.is_cuda)

    def _returned(self, tensor: Tensor, host: Tensor) -> Tensor:
        self._back.append((tensor, host))
        return host


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether both lie in one storage: pieces of it that do not touch are told apart only if they are
    contiguous."""
    if one.device != other.device or one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    apart = (
        one.data_ptr() >= other.data_ptr() + other.nbytes or other.data_ptr() >= one.data_ptr() + one.nbytes
    )
    return not (apart and one.is_contiguous() and other.is_contiguous())
