"""The numbers of storages on a tape, during the construction."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from meshloom.parameters.construction.tape import Place, Tape, address, constant_digest

COLLECT_BYTES = 1 << 20  # garbage of this size is collected before tensors outside of the model are counted


class StorageNumbers:
    """Numbers storages as they are made."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._numbers: dict[int, int] = {}  # by address
        self._alive: list[StorageWeakRef] = []  # addresses are not used again while these exist

    def number(self, storage: torch.UntypedStorage) -> int | None:
        """None: no recorded operator has made or used it."""
        return self._numbers.get(address(storage))

    def place(self, tensor: Tensor) -> Place:
        """Where a tensor lies; a storage that is unknown so far is a constant."""
        storage = tensor.untyped_storage()
        number = self.number(storage)
        if number is None:
            number = self.add(storage)
            self._tape.constants[number] = storage
            self._tape.digests[number] = constant_digest(storage)
        return Place(
            storage=number,
            dtype=tensor.dtype,
            size=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=tensor.storage_offset(),  # pyright: ignore[reportArgumentType]
            conjugated=tensor.is_conj(),
            negated=tensor.is_neg(),
        )

    def add(self, storage: torch.UntypedStorage) -> int:
        """The number of a storage that is new."""
        number = self._tape.new_storage(storage.nbytes())
        self._numbers[address(storage)] = number
        self._alive.append(StorageWeakRef(storage))
        return number

    def storage(self, number: int) -> torch.UntypedStorage:
        """Of this number, which must still be referred to."""
        weak: Any = torch.UntypedStorage
        return weak._new_with_weak_ptr(self._alive[number].cdata)

    def outside(self, inside: set[int]) -> dict[int, torch.UntypedStorage]:
        """Storages that are referred to, but not by the model's parameters and buffers, and have no values."""

        def found() -> list[int]:
            return [
                number
                for number, each in enumerate(self._alive)
                if number not in inside
                and not each.expired()
                and self._tape.num_bytes[number]
                and (number not in self._tape.constants or self._tape.is_written(number))
            ]

        numbers = found()
        if sum(self._tape.num_bytes[each] for each in numbers) > COLLECT_BYTES:
            gc.collect()
            numbers = found()
        return {number: self.storage(number) for number in numbers}
