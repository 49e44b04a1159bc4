"""Tensors in windows: memory of each rank that all ranks of its group have mapped and access in place.

window of rank 0   [ a a a a | b b .. | c c c ]     consecutive extents, each at a multiple of 64 bytes
window of rank 1   [ a a a a | b b .. | c c c ]     the same layout
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from meshloom.comm.group import Group
from meshloom.comm.recording import RecordedGroup
from meshloom.core.units import round_up

_ALIGNMENT = 64  # bytes: a cache line, and the alignment of vector instructions


class Window(Protocol):
    """Memory of every rank. It is freed once the group is closed and no tensor uses it."""

    def of(self, rank: int) -> Tensor:
        """That rank's memory, uint8 [num_bytes]; the same memory on all ranks."""
        ...


@runtime_checkable
class Windows(Protocol):
    """A group whose ranks can share memory."""

    def window(self, num_bytes: int, owner: int | None = None) -> Window:
        """Allocate `num_bytes` of zeros on each rank, or on `owner` alone. A collective of equal sizes."""
        ...


@dataclass(frozen=True, kw_only=True)
class Extent:
    """The number of elements, dtype and device of a flat tensor that is to be allocated."""

    num_elements: int
    dtype: torch.dtype
    device: torch.device


def windows_of(group: Group) -> Windows | None:
    """The group, without its recording, if its ranks can share memory."""
    inner = group.group if isinstance(group, RecordedGroup) else group
    return inner if isinstance(inner, Windows) else None


def allocation(windows: Windows | None, rank: int) -> Callable[[Sequence[Extent]], list[Tensor]]:
    """A function that allocates flat tensors of zeros: in this rank's part of a new window, if it can."""
    if windows is None:
        return separate
    return lambda extents: in_window(windows.window(window_bytes(extents)), rank, extents)


def separate(extents: Sequence[Extent]) -> list[Tensor]:
    """Flat tensors of zeros [num_elements], each with its own memory."""
    return [torch.zeros(each.num_elements, dtype=each.dtype, device=each.device) for each in extents]


def in_window(window: Window, rank: int, extents: Sequence[Extent]) -> list[Tensor]:
    """Flat tensors [num_elements], one after another, in a rank's part of `window_bytes(extents)`."""
    memory = window.of(rank)
    tensors: list[Tensor] = []
    at = 0
    for each in extents:
        num_bytes = each.num_elements * each.dtype.itemsize
        tensors.append(memory[at : at + num_bytes].view(each.dtype))
        at += round_up(num_bytes, _ALIGNMENT)
    return tensors


def window_bytes(extents: Sequence[Extent]) -> int:
    """Bytes of a window for tensors of these extents.

    >>> window_bytes([Extent(num_elements=3, dtype=torch.float32, device=torch.device("cpu"))] * 2)
    128
    """
    return sum(round_up(each.num_elements * each.dtype.itemsize, _ALIGNMENT) for each in extents)


def next_start(stop: int, parameter: Tensor) -> int:
    """Where a parameter begins in a flat tensor that is filled up to `stop`: pairs of numbers at an even element, as `torch.view_as_complex`
    wants them.

    >>> next_start(3, torch.ones(4)), next_start(3, torch.ones(4, 2))
    (3, 4)
    """
    return round_up(stop, 2) if parameter.shape[-1:] == (2,) else stop
