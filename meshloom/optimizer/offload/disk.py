"""Optimizer state on a disk: in a mapped file, of which a window is in memory while it is updated.

    backward       the kernel reads the first window's state from disk
    update         window 1: step | give back      window 2: step | give back      ...
                   meanwhile, the kernel reads window 2 ...       window 3 ...

Tensors of a page or more that an optimizer has as state of a parameter are moved into a mapped file as soon as they
are there, whatever made them: they stay the same objects, so an optimizer does not notice. Smaller ones stay in memory.

    file      [ exp_avg | exp_avg_sq | ...   | reserved ]    extents of whole pages
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshloom.core.errors import PlanError
from meshloom.core.state_sizes import tensors_per_parameter
from meshloom.core.units import format_bytes, round_up
from meshloom.machine.file_system import file_system_of, is_remote, keeps_in_memory
from meshloom.machine.process_memory import trim
from meshloom.optimizer.offload.offloaded_state import OffloadedState
from meshloom.optimizer.offload.windows import (
    WINDOW_BYTES,
    Window,
    all_windows,
    parameters_of,
    step_in_windows,
)

PAGE = mmap.PAGESIZE
RESERVED_BYTES = 16 * 2**20  # at least, at a time
SMALLEST = PAGE  # bytes of a tensor that is moved
PERSISTENT = Path("/var/tmp")  # temporary files that outlive a restart are on a disk


class StateOnDisk(OffloadedState):
    """The state of `optimizers` in a file.

    in_windows: whether each of them may be stepped in windows (`UserOptimizers.in_windows`).
    """

    def __init__(self, optimizers: Sequence[Optimizer], in_windows: Sequence[bool]) -> None:
        self._optimizers, self._in_windows = optimizers, in_windows
        self._windows: dict[int, list[Window]] = {}  # by id of the optimizer
        self._file: StateFile | None = None
        self._updated: set[Optimizer] = set()

    def open(self, files: Path | None) -> None:
        self._file = StateFile(directory_for(files))
        needed = sum(state_bytes_of(each) for each in self._optimizers)
        if needed:
            self._file.reserve(needed)
        self._windows = all_windows(self._optimizers, self._in_windows, WINDOW_BYTES)
        self.keep_all()  # what constructors made

    def begin_step(self) -> None:
        if self._file is not None and self._optimizers:
            self._file.ask_for(self._tensors(self._optimizers[0], 0))

    def step(self, optimizer: Optimizer) -> None:
        assert self._file is not None
        file, windows = self._file, self._windows[id(optimizer)]
        everyone = [parameters_of(optimizer, window) for window in windows]
        following = self._optimizers[self._optimizers.index(optimizer) + 1 :][:1]

        def step(number: int, update: Any) -> None:
            if number + 1 < len(windows):
                file.ask_for(_state_of(optimizer, everyone[number + 1]))
            elif following:
                file.ask_for(self._tensors(following[0], 0))
            update()
            for parameter in everyone[number]:
                self.keep(optimizer, parameter)
            if optimizer not in self._updated:
                # the first update makes the state, in memory that nothing else may fit
                trim()

        step_in_windows(optimizer, windows, step)
        file.give_back_all()
        self._updated.add(optimizer)

    def keep(self, optimizer: Optimizer, parameter: nn.Parameter) -> None:
        """Moves the state of a parameter into the file, unless it is there, and gives its pages back."""
        assert self._file is not None
        tensors = list(_state_of(optimizer, [parameter]))
        for each in tensors:
            if not self._file.holds(each) and _is_movable(each):
                self._file.place(each)
        self._file.give_back(tensors)

    def keep_all(self) -> None:
        for optimizer, windows in ((each, self._windows[id(each)]) for each in self._optimizers):
            for parameter in (each for window in windows for each in parameters_of(optimizer, window)):
                self.keep(optimizer, parameter)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def let_go(self, tensor: Tensor) -> None:
        assert self._file is not None
        self._file.give_back([tensor])

    def notes(self) -> list[str]:
        assert self._file is not None
        where = f"{self._file.directory} ({file_system_of(self._file.directory) or 'unknown file system'})"
        if not self._file.num_bytes:
            return [
                f"Optimizer state stays in memory: none of its tensors has {format_bytes(SMALLEST)} on this rank, and smaller ones are not offloaded."
            ]
        notes = [
            f"Optimizer state is in an unlinked file in {where}, {format_bytes(self._file.num_bytes)} on this rank; in an update, the state of "
            f"{format_bytes(WINDOW_BYTES)} of parameters or of one larger parameter is in memory at a time."
        ]
        whole = [
            type(each).__name__
            for each, may in zip(self._optimizers, self._in_windows, strict=True)
            if not may
        ]
        if whole:
            notes.append(
                f"{', '.join(dict.fromkeys(whole))} cannot update a few parameters at a time (its rule is not known, or its step has hooks), so "
                "all of its state is in memory during an update, as far as the kernel lets it be."
            )
        return notes

    def _tensors(self, optimizer: Optimizer, number: int) -> Iterator[Tensor]:
        return _state_of(optimizer, parameters_of(optimizer, self._windows[id(optimizer)][number]))


def directory_for(files: Path | None) -> Path:
    """Where the file is made: in the run's own directory, unless that is on another machine; else where temporary files
    go, or in /var/tmp if those are in memory."""
    if files is not None and files.is_dir() and not is_remote(files):
        return files
    temporary = Path(tempfile.gettempdir())
    elsewhere = keeps_in_memory(temporary) and PERSISTENT.is_dir()
    return PERSISTENT if elsewhere and not keeps_in_memory(PERSISTENT) else temporary


def state_bytes_of(optimizer: Optimizer) -> int:
    """Bytes in the file that an optimizer's state will take, in whole pages."""
    return sum(
        tensors_per_parameter(optimizer, group) * round_up(each.nbytes, PAGE)
        for group in optimizer.param_groups
        for each in group["params"]
        if each.nbytes >= SMALLEST
    )


def _state_of(optimizer: Optimizer, parameters: Any) -> Iterator[Tensor]:
    """The tensors of these parameters' state, also in lists, tuples and dicts."""
    for parameter in parameters:
        if parameter in optimizer.state:
            yield from _tensors_in(optimizer.state[parameter])


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(each)


def _is_movable(tensor: Tensor) -> bool:
    """Whether it is large, and all of a memory that nothing else refers to."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.nbytes < SMALLEST:
        return False
    return tensor.untyped_storage().nbytes() == tensor.nbytes and is_alone(tensor)


@dataclass(frozen=True)
class _Extent:
    """What is mapped from byte `offset` of the file."""

    mapped: mmap.mmap
    offset: int


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
        self._size = self._used = 0  # what is reserved, and how much of it tensors have had
        self._freed: defaultdict[int, list[int]] = defaultdict(list)  # offsets by length
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
        except OSError as error:
            os.ftruncate(self._file.fileno(), self._size)
            raise PlanError(
                f"offload=optimizer needs {format_bytes(self._size + length)} of disk for the optimizer's state of this rank, and {self.directory} has "
                f"{format_bytes(self._size + free)} for it ({error.strerror}). Make room, give --out (out=) or TMPDIR a directory on a larger disk, or leave "
                "offload out."
            ) from error
        self._size += length

    def place(self, tensor: Tensor) -> None:
        """Moves a tensor's elements into the file; the tensor stays the same object."""
        moved = _like(tensor, self._take(round_up(tensor.nbytes, PAGE)))
        moved.copy_(tensor.detach())
        tensor.data = moved

    def holds(self, tensor: Tensor) -> bool:
        """Whether this tensor has one of the file's extents."""
        return self._extent_of(tensor) is not None

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        """Takes the pages of these tensors from this process. Their values stay the file's."""
        for each in self._extents(tensors):
            each.mapped.madvise(mmap.MADV_DONTNEED)

    def give_back_all(self) -> None:
        """Takes all pages of the file from this process: the kernel also maps neighbours of those that are used."""
        for each in self._taken.values():
            each.mapped.madvise(mmap.MADV_DONTNEED)

    def ask_for(self, tensors: Iterable[Tensor]) -> None:
        """Has the kernel read pages of these tensors that are no more in memory, while this process goes on."""
        for each in self._extents(tensors):
            os.posix_fadvise(self._file.fileno(), each.offset, len(each.mapped), os.POSIX_FADV_WILLNEED)

    def _extents(self, tensors: Iterable[Tensor]) -> list[_Extent]:
        return [extent for each in tensors if (extent := self._extent_of(each)) is not None]

    def _extent_of(self, tensor: Tensor) -> _Extent | None:
        """That which a tensor, or what it is a part of, has; None: it has none."""
        address = tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0
        return self._taken.get(address)

    def _take(self, length: int) -> Tensor:
        """Bytes of the file [length] that no tensor has. They are free again when nothing refers to them."""
        if self._freed[length]:
            offset = self._freed[length].pop()
        else:
            if self._used + length > self._size:
                self.reserve(max(self._used + length - self._size, RESERVED_BYTES))
            offset, self._used = self._used, self._used + length
        mapped = mmap.mmap(self._file.fileno(), length, mmap.MAP_SHARED, offset=offset)
        buffer = memoryview(mapped)
        bits = torch.frombuffer(buffer, dtype=torch.uint8)
        self._taken[bits.data_ptr()] = _Extent(mapped, offset)
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


def _let_go(taken: dict[int, _Extent], freed: dict[int, list[int]], address: int) -> None:
    extent = taken.pop(address)
    freed[len(extent.mapped)].append(extent.offset)
