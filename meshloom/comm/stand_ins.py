"""Contiguous host tensors in the place of tensors on a GPU or with gaps, for a transport that knows no others.

    near = StandIns()
    host = near.changed(tensor)      the tensor itself, if it is contiguous and on the CPU; else a copy (pinned, for a GPU's)
    near.arrive()                    what was copied from GPUs is there
    ...                              the transport reads and writes `host`
    near.bring_back()                what was written goes where it belongs

Copies from and to a GPU run on the stream that was current when the stand-in was made: what was enqueued there before is read, and what
is enqueued there after `bring_back`, or on a stream that calls `follow`, finds the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class StandIns:
    """Those of one call."""

    def __init__(self) -> None:
        self._back: list[tuple[Tensor, Tensor]] = []  # where it belongs, and what was written in its place
        self._streams: dict[torch.device, Any] = {}

    def read(self, tensor: Tensor) -> Tensor:
        """`tensor`, to be read: contiguous, on the CPU."""
        tensor = tensor.detach()
        return tensor if _is_plain(tensor) else self._copy_of(tensor)

    def changed(self, tensor: Tensor) -> Tensor:
        """`tensor`, to be read and written."""
        host = self.read(tensor)
        return self._returned(tensor.detach(), host)

    def written(self, tensor: Tensor, apart_from: Tensor | None = None) -> Tensor:
        """`tensor`, to be written only; not in memory that `apart_from` is read from."""
        tensor = tensor.detach()
        if _is_plain(tensor) and not (apart_from is not None and overlap(tensor, apart_from)):
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
            self._back.append((tensor.detach(), part.view(tensor.shape)))
        return flat

    def arrive(self) -> None:
        """Wait for the copies from GPUs."""
        for stream in self._streams.values():
            stream.synchronize()

    def bring_back(self) -> None:
        """Copy what was written."""
        self.on_streams(lambda: [tensor.copy_(host, non_blocking=True) for tensor, host in self._back])
        self._back = []

    def follow(self) -> None:
        """What the current streams run next comes after what was brought back."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def devices(self) -> list[torch.device]:
        """The GPUs whose tensors take part."""
        return list(self._streams)

    def on_streams(self, act: Callable[[], object]) -> None:
        """`act()` while the streams of this call are current."""
        streams = list(self._streams.values())
        if not streams:
            act()
            return
        with torch.cuda.stream(streams[0]):  # all tensors of a call lie on one GPU, as torch.distributed demands
            act()

    def _copy_of(self, tensor: Tensor) -> Tensor:
        host = self._empty(tensor.shape, tensor)
        return host.copy_(tensor, non_blocking=True)

    def _empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        if like.is_cuda:
            self._streams.setdefault(like.device, torch.cuda.current_stream(like.device))
        return torch.empty(shape, dtype=like.dtype, pin_memory=like.is_cuda)

    def _returned(self, tensor: Tensor, host: Tensor) -> Tensor:
        if host is not tensor and not (_is_plain(tensor) and host.data_ptr() == tensor.data_ptr()):
            self._back.append((tensor, host))
        return host


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    return one.device == other.device and one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes


def _is_plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
