"""Tensors in windows: memory of each rank that all ranks of its group have mapped, so that they read and
write it where it lies.

window of rank 0   [ a a a a | b b .. | c c c ]     extents one behind the other, each at a multiple of 64 bytes
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

_ALIGNMENT = 64  # bytes: a cache line, and what vector instructions like best


class Window(Protocol):
    """A piece of memory of every rank. It goes when the group is closed and no tensor uses it any more."""

    def of(self, rank: int) -> Tensor:
        """Bytes [num_bytes] of that rank, the same memory on all ranks."""
        ...


@runtime_checkable
class Windows(Protocol):
    """A group whose ranks can have memory in common."""

    def window(self, num_bytes: int, owner: int | None = None) -> Window:
        """New memory of `num_bytes` on each rank, or on `owner` alone, zeros. An operation of the group: all
        ranks make it together, of one size."""
        ...


@dataclass(frozen=True, kw_only=True)
class Extent:
    """What a flat tensor is made for: its number of elements, its dtype, its device."""

    num_elements: int
    dtype: torch.dtype
    device: torch.device


def windows_of(group: Group) -> Windows | None:
    """The group as one whose ranks can have memory in common, if they can."""
    talks = group.group if isinstance(group, RecordedGroup) else group
    return talks if isinstance(talks, Windows) else None


def allocation(windows: Windows | None, rank: int) -> Callable[[Sequence[Extent]], list[Tensor]]:
    """What makes flat tensors of zeros: in a new window, in this rank's part, or each for itself if there are
    no windows."""
    if windows is None:
        return separate
    return lambda extents: in_window(windows.window(window_bytes(extents)), rank, extents)


def separate(extents: Sequence[Extent]) -> list[Tensor]:
    """Flat tensors of zeros, each with memory of its own."""
    return [torch.zeros(each.num_elements, dtype=each.dtype, device=each.device) for each in extents]


def in_window(window: Window, rank: int, extents: Sequence[Extent]) -> list[Tensor]:
    """Flat tensors one behind the other in a rank's part of a window of `window_bytes(extents)`."""
    memory = window.of(rank)
    tensors: list[Tensor] = []
    at = 0
    for each in extents:
        num_bytes = each.num_elements * each.dtype.itemsize
        tensors.append(memory[at : at + num_bytes].view(each.dtype))
        at += _aligned(num_bytes)
    return tensors


def window_bytes(extents: Sequence[Extent]) -> int:
    """Size of the window that they need.

    >>> window_bytes([Extent(num_elements=3, dtype=torch.float32, device=torch.device("cpu"))] * 2)
    128
    """
    return sum(_aligned(each.num_elements * each.dtype.itemsize) for each in extents)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
