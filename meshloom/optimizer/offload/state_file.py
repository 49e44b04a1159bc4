"""Tensors in an unlinked file that is mapped into memory, so that the kernel can write them to disk and take their
pages.

    file      [ arena 0                      | arena 1            ]    disk is reserved when an arena is made
              [ exp_avg | exp_avg_sq | ...   | ...                ]    extents of whole pages
    memory      ^ mapped, shared: what is written is the file's; pages that were given back are read again

The file has no name: nothing is left over, however the process ends.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshloom.core.errors import PlanError
from meshloom.core.units import format_bytes, round_up
from meshloom.machine.file_system import file_system_of, keeps_in_memory

PAGE = mmap.PAGESIZE
ARENA_BYTES = 16 * 2**20  # at least, of an arena that nobody reserved


@dataclass(frozen=True)
class _Extent:
    """Bytes `start` to `start` + `length` of an arena that begins at byte `offset` of the file."""

    arena: mmap.mmap
    offset: int
    start: int
    length: int


class StateFile:
    """Tensors of one rank in an unlinked file in `directory`.

    Raises `PlanError` if that directory keeps its files in memory, or has no room.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if keeps_in_memory(directory):
            raise PlanError(
                f"offload=optimizer keeps the optimizer's state on disk, and {directory} is on {file_system_of(directory)}, which is memory. Give --out (out=) "
                "a directory on a disk, or set TMPDIR to one."
            )
        try:
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  # open as long as this object lives
        except OSError as error:
            raise PlanError(
                f"offload=optimizer keeps the optimizer's state in a file in {directory}, where none can be made: {error.strerror}. Give --out (out=) a "
                "directory on a disk, or set TMPDIR to one."
            ) from error
        self.close = weakref.finalize(self, self._file.close)  # what is mapped stays
        self._size = 0
        self._arena: _Extent | None = None  # what is left of the newest arena
        self._freed: defaultdict[int, list[_Extent]] = defaultdict(list)  # by length
        self._taken: dict[int, _Extent] = {}  # by address

    @property
    def num_bytes(self) -> int:
        """Of the file: what is reserved on the disk."""
        return self._size

    def reserve(self, num_bytes: int) -> None:
        """Takes so much of the disk, for tensors to come. Raises `PlanError` if it is not there."""
        length = round_up(max(num_bytes, PAGE), PAGE)
        free = shutil.disk_usage(self.directory).free
        try:
            if free < length:  # some file systems would fill the disk before they fail
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self._file.fileno(), self._size, length)
            arena = mmap.mmap(self._file.fileno(), length, mmap.MAP_SHARED, offset=self._size)
        except OSError as error:
            os.ftruncate(self._file.fileno(), self._size)
            raise PlanError(
                f"offload=optimizer needs {format_bytes(self._size + length)} of disk for the optimizer's state of this rank, and {self.directory} has "
                f"{format_bytes(self._size + free)} for it ({error.strerror}). Make room, give --out (out=) or TMPDIR a directory on a larger disk, or leave "
                "offload out."
            ) from error
        self._arena = _Extent(arena, self._size, 0, length)
        self._size += length

    def place(self, tensor: Tensor) -> None:
        """Moves a tensor's elements into the file; the tensor stays the same object."""
        bits = self._take(round_up(tensor.nbytes, PAGE))[: tensor.nbytes]
        moved = bits.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        moved.copy_(tensor.detach())
        tensor.data = moved

    def holds(self, tensor: Tensor) -> bool:
        """Whether this tensor begins one of the file's extents."""
        return tensor.data_ptr() in self._taken

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        """Takes the pages of these tensors from this process. Their values stay the file's."""
        for each in self._extents(tensors):
            each.arena.madvise(mmap.MADV_DONTNEED, each.start, each.length)

    def ask_for(self, tensors: Iterable[Tensor]) -> None:
        """Has the kernel read pages of these tensors that are no more in memory, while this process goes on."""
        for each in self._extents(tensors):
            start = each.offset + each.start
            os.posix_fadvise(self._file.fileno(), start, each.length, os.POSIX_FADV_WILLNEED)

    def _extents(self, tensors: Iterable[Tensor]) -> list[_Extent]:
        found = (self._taken.get(each.data_ptr()) for each in tensors)
        return [each for each in found if each is not None]

    def _take(self, length: int) -> Tensor:
        """Bytes of the file [length] that no tensor has. They are free again when nothing refers to them."""
        if self._freed[length]:
            extent = self._freed[length].pop()
        else:
            if self._arena is None or self._arena.length - self._arena.start < length:
                self.reserve(max(length, ARENA_BYTES))
            assert self._arena is not None
            left = self._arena
            extent = _Extent(left.arena, left.offset, left.start, length)
            self._arena = _Extent(left.arena, left.offset, left.start + length, left.length)
        buffer = memoryview(extent.arena)[extent.start : extent.start + length]
        bits = torch.frombuffer(buffer, dtype=torch.uint8)
        self._taken[bits.data_ptr()] = extent
        weakref.finalize(buffer, _let_go, self._taken, self._freed, bits.data_ptr()).atexit = False
        return bits


def _let_go(taken: dict[int, _Extent], freed: dict[int, list[_Extent]], address: int) -> None:
    extent = taken.pop(address)
    freed[extent.length].append(extent)
