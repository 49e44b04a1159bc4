"""Optimizer state on a disk: in a mapped file, of which a window is in memory while it is updated.

    backward       the kernel reads the first window's state from disk
    update         window 1: step | give back      window 2: step | give back      ...
                   meanwhile, the kernel reads window 2 ...       window 3 ...

Tensors of a page or more that an optimizer has as state of a parameter are moved into a mapped file as soon as they
are there, whatever made them: they stay the same objects, so an optimizer does not notice. Smaller ones stay in memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshloom.checkpoint.lending import Lender
from meshloom.core.units import format_bytes, round_up
from meshloom.machine.file_system import file_system_of, is_remote, keeps_in_memory
from meshloom.machine.process_memory import trim
from meshloom.optimizer.offload.file_lender import FileLender
from meshloom.optimizer.offload.offloaded_state import OffloadedState
from meshloom.optimizer.offload.state_file import PAGE, StateFile, is_alone
from meshloom.optimizer.offload.windows import (
    WINDOW_BYTES,
    Window,
    all_windows,
    parameters_of,
    step_in_windows,
)

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
        self._lender: FileLender | None = None
        self._updated: set[Optimizer] = set()

    def open(self, files: Path | None) -> None:
        self._file = StateFile(directory_for(files))
        self._lender = FileLender(self._file)
        needed = sum(state_bytes_of(each) for each in self._optimizers)
        if needed:
            self._file.reserve(needed)
        self._windows = all_windows(self._optimizers, self._in_windows, WINDOW_BYTES)
        self.keep_all()  # what constructors made

    def begin_step(self) -> None:
        if self._file is not None and self._optimizers:
            self._file.ask_for(self._tensors(self._optimizers[0], 0))

    def step(self, optimizer: Optimizer) -> None:
        assert self._file is not None and self._lender is not None
        file, lender, windows = self._file, self._lender, self._windows[id(optimizer)]
        everyone = [parameters_of(optimizer, window) for window in windows]
        following = self._optimizers[self._optimizers.index(optimizer) + 1 :][:1]

        def step(number: int, update: Any) -> None:
            if number + 1 < len(windows):
                file.ask_for(_state_of(optimizer, everyone[number + 1]))
            elif following:
                file.ask_for(self._tensors(following[0], 0))
            lender.separate(_state_of(optimizer, everyone[number]))
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

    @property
    def lender(self) -> Lender | None:
        return self._lender

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
        _tensors_per_parameter(optimizer, group) * round_up(each.nbytes, PAGE)
        for group in optimizer.param_groups
        for each in group["params"]
        if each.nbytes >= SMALLEST
    )


def _tensors_per_parameter(optimizer: Optimizer, group: Mapping[str, Any]) -> int:
    """Tensors of state that are as large as their parameter."""
    match type(optimizer):
        case torch.optim.SGD:
            return int(group["momentum"] != 0)
        case torch.optim.Adam | torch.optim.AdamW:
            return 2 + int(group["amsgrad"])
        case torch.optim.RMSprop:
            return 1 + int(group["momentum"] > 0) + int(group["centered"])
        case torch.optim.Adagrad | torch.optim.ASGD | torch.optim.Muon:
            return 1
        case torch.optim.Adafactor:
            return 0  # rows and columns
        case _:
            return 2


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
