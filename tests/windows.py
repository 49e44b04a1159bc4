"""Memory in common for simulated ranks: what `ShmGroup.window` is for processes, in one."""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor

from meshloom.comm.group import Group
from meshloom.comm.recording import RecordedGroup
from meshloom.comm.simulated import SimulatedGroup
from meshloom.comm.windows import Windows
from meshloom.replica import replica


class OneProcess:
    """The windows of one simulated group, as one of its ranks sees them: the rank that comes first makes the
    tensors."""

    _made: ClassVar[WeakKeyDictionary[Any, list[list[Tensor]]]] = WeakKeyDictionary()  # of each group

    def __init__(self, group: Group) -> None:
        inner = group.group if isinstance(group, RecordedGroup) else group
        assert isinstance(inner, SimulatedGroup)
        self._size, self._windows, self._next = inner.size, self._made.setdefault(inner._rendezvous, []), 0

    def window(self, num_bytes: int, owner: int | None = None) -> Pieces:
        """The next one of this rank."""
        if self._next == len(self._windows):
            sizes = [num_bytes if owner in (None, rank) else 0 for rank in range(self._size)]
            self._windows.append([torch.zeros(size, dtype=torch.uint8) for size in sizes])
        self._next += 1
        return Pieces(self._windows[self._next - 1])


class Pieces:
    """One window."""

    def __init__(self, memory: list[Tensor]) -> None:
        self._memory = memory

    def of(self, rank: int) -> Tensor:
        """As in `comm/windows.py`."""
        return self._memory[rank]


def give_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated ranks have memory in common from now on. Their class stays as it is: Python keeps what
    `isinstance` once said of a class."""
    known: WeakKeyDictionary[SimulatedGroup, OneProcess] = WeakKeyDictionary()

    def windows_of(group: Group) -> Windows | None:
        inner = group.group if isinstance(group, RecordedGroup) else group
        if not isinstance(inner, SimulatedGroup):
            return None
        if inner not in known:
            known[inner] = OneProcess(inner)
        return known[inner]

    monkeypatch.setattr(replica, "windows_of", windows_of)
