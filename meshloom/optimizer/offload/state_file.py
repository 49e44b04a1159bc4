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
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshloom.core.errors import PlanError
from meshloom.core.units import format_bytes, round_up
from meshloom.machine.file_system import file_system_of, keeps_in_memory

PAGE = mmap.PAGESIZE
ARENA_BYTES = 16 * 2**20  # at least, of an arena that nobody reserved
_COPIED_BYTES = 16 * 2**20  # of a tensor that is moved, in memory at one time


@dataclass(frozen=True)
class _Extent:
    """`length` bytes from byte `start` of an arena that begins at byte `offset` of the file."""

    arena: mmap.mmap
    offset: int
    start: int
    length: int

    def first(self, length: int) -> _Extent:
        return replace(self, length=length)

    def after(self, length: int) -> _Extent:
        return replace(self, start=self.start + length, length=self.length - length)


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
        self._arenas: list[mmap.mmap] = []
        self._left: list[_Extent] = []  # of each arena, what no tensor has had
        self._freed: defaultdict[int, list[_Extent]] = defaultdict(list)  # by length
        self._taken: dict[int, _Extent] = {}  # by address
        self._buffers = weakref.WeakValueDictionary[int, memoryview]()  # of what is taken, by address

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
        self._arenas.append(arena)
        self._left.append(_Extent(arena, self._size, 0, length))
        self._size += length

    def take_back(self) -> None:
        """Returns to the disk what was reserved last, of which nothing may have been taken."""
        last = self._left.pop()
        assert last.start == 0 and last.offset + last.length == self._size
        self._arenas.pop().close()
        os.ftruncate(self._file.fileno(), last.offset)
        self._size = last.offset

    def missing_bytes(self, tensors: Iterable[Tensor]) -> int:
        """Bytes to reserve before each of these, or what they are parts of, can be moved while it stays where it is,
        too."""
        extents = {(each.offset, each.start): each.length for each in self._extents(tensors)}
        return sum(
            length * max(count - len(self._freed[length]), 0)
            for length, count in Counter(extents.values()).items()
        )

    def place(self, tensor: Tensor) -> None:
        """Moves a tensor's elements into the file; the tensor stays the same object."""
        moved = _like(tensor, self._take(round_up(tensor.nbytes, PAGE)))
        moved.copy_(tensor.detach())
        tensor.data = moved

    def move(self, tensor: Tensor) -> None:
        """Moves a tensor of the file to another place in it; the tensor stays the same object, and its elements stay
        where they were, too, as long as something refers to them there."""
        (before,) = self._extents([tensor])
        bits = self._take(before.length)
        after = self._taken[bits.data_ptr()]
        here, there, at = before.offset + before.start, after.offset + after.start, 0
        while at < before.length:
            # not through memory: reading maps neighbours, too, and writing reads what the disk has there before
            content = os.pread(self._file.fileno(), min(_COPIED_BYTES, before.length - at), here + at)
            at += os.pwrite(self._file.fileno(), content, there + at)
        tensor.data = _like(tensor, bits)

    def address_of(self, tensor: Tensor) -> int | None:
        """Where the extent of this file begins that a tensor, or what it is a part of, has; None: it has none."""
        address = tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0
        return address if address in self._taken else None

    def holds(self, tensor: Tensor) -> bool:
        """Whether this tensor has one of the file's extents."""
        return self.address_of(tensor) is not None

    def same_elements(self, tensor: Tensor) -> Tensor:
        """The elements of a consecutive part of a tensor of the file, flat, at the same place: they keep it from being
        used again, and do not show as something that refers to the tensor's memory."""
        address = self.address_of(tensor)
        assert address is not None
        bits = torch.frombuffer(self._buffers[address], dtype=torch.uint8)
        start = tensor.data_ptr() - address
        return bits[start : start + tensor.nbytes].view(tensor.dtype)

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        """Takes the pages of these tensors from this process. Their values stay the file's."""
        for each in self._extents(tensors):
            each.arena.madvise(mmap.MADV_DONTNEED, each.start, each.length)

    def give_back_all(self) -> None:
        """Takes all pages of the file from this process: the kernel also maps neighbours of those that are used."""
        for each in self._arenas:
            each.madvise(mmap.MADV_DONTNEED)

    def ask_for(self, tensors: Iterable[Tensor]) -> None:
        """Has the kernel read pages of these tensors that are no more in memory, while this process goes on."""
        for each in self._extents(tensors):
            start = each.offset + each.start
            os.posix_fadvise(self._file.fileno(), start, each.length, os.POSIX_FADV_WILLNEED)

    def _extents(self, tensors: Iterable[Tensor]) -> list[_Extent]:
        found = (self.address_of(each) for each in tensors)
        return [self._taken[each] for each in found if each is not None]

    def _take(self, length: int) -> Tensor:
        """Bytes of the file [length] that no tensor has. They are free again when nothing refers to them."""
        if self._freed[length]:
            extent = self._freed[length].pop()
        else:
            number = next((i for i, each in enumerate(self._left) if each.length >= length), -1)
            if number < 0:
                self.reserve(max(length, ARENA_BYTES))
            extent = self._left[number].first(length)
            self._left[number] = self._left[number].after(length)
        buffer = memoryview(extent.arena)[extent.start : extent.start + length]
        bits = torch.frombuffer(buffer, dtype=torch.uint8)
        self._taken[bits.data_ptr()] = extent
        self._buffers[bits.data_ptr()] = buffer
        weakref.finalize(buffer, _let_go, self._taken, self._freed, bits.data_ptr()).atexit = False
        return bits


def is_alone(tensor: Tensor) -> bool:
    """Whether nothing else refers to a tensor's memory."""
    storage: Any = tensor.untyped_storage()
    inner: Any = vars(torch)["_C"]
    return inner._storage_Use_Count(storage._cdata) == 2  # the tensor's own, and `storage`


def _like(tensor: Tensor, bits: Tensor) -> Tensor:
    """The first bytes of `bits` as a tensor of the same shape and strides."""
    return bits[: tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def _let_go(taken: dict[int, _Extent], freed: dict[int, list[_Extent]], address: int) -> None:
    extent = taken.pop(address)
    freed[extent.length].append(extent)
