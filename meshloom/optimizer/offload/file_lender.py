"""State in a file that a save reads while training goes on: updates write to other places of the file.

    saved       a1 b1 c1        read by the save until it is done; then the room is free for the next one
    updated     a2 b2 c1        a, b: their windows were updated since, from copies; c: not yet
    later       a3 b3 c2        in place, but for c

A tensor's memory tells where it is now: the tensor stays the same object.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from meshloom.checkpoint.lending import Lender
from meshloom.core.errors import PlanError
from meshloom.optimizer.offload.state_file import StateFile, is_alone


class FileLender(Lender):
    """Lends tensors of `file`."""

    def __init__(self, file: StateFile) -> None:
        self._file = file
        self._lent: frozenset[int] = frozenset()  # where their extents begin
        self._over = threading.Event()
        self._over.set()

    @property
    def directory(self) -> Path:
        return self._file.directory

    def lends(self, tensor: Tensor) -> bool:
        return self._file.address_of(tensor) is not None and tensor.is_contiguous()

    def missing_bytes(self, tensors: Sequence[Tensor]) -> int:
        return self._file.missing_bytes(tensors)

    def reserve(self, num_bytes: int) -> None:
        self._file.reserve(num_bytes)

    def take_back(self) -> None:
        self._file.take_back()

    def lend(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        assert self._over.is_set(), "what was lent is still read"
        found = (self._file.address_of(each) for each in tensors)
        self._lent = frozenset(each for each in found if each is not None)
        self._over.clear()
        return [self._file.same_elements(each) for each in tensors]

    def separate(self, tensors: Iterable[Tensor]) -> None:
        """Gives tensors that are about to be updated places of their own, with the same elements, if theirs are lent.

        Waits until nothing is lent where that cannot be: something else refers to a tensor's memory, or there is no
        room.
        """
        for each in tensors:
            if self._over.is_set():
                return
            if self._file.address_of(each) in self._lent and not self._moved(each):
                self._over.wait()

    def let_go(self, tensor: Tensor) -> None:
        self._file.give_back([tensor])

    def end(self) -> None:
        self._over.set()

    def _moved(self, tensor: Tensor) -> bool:
        try:
            if is_alone(tensor):
                self._file.move(tensor)
                return True
        except PlanError:  # the disk is full
            pass
        return False
