"""Casts of a unit's parameters that autocast keeps: they let go of their memory with the unit, and get it back with it.

Autocast casts a parameter once for all its uses in a loss, so that their gradients add up in the lower precision, and keeps
the cast until the loss has been computed: half of the model's bytes on every rank. The cast stays the same tensor here; only
its memory comes and goes.

    forward of the unit | let go | forward of others | (forward of the unit again: filled anew) | end of the loss: nothing is left

A cast that the user's code has made, or that anything else refers to, is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from meshloom.core.modules.casts import cast_of
from meshloom.exchange.units.unit_slices import Unit, UnitEntry

_torch: Any = torch  # for private names
_OWN = 2  # references to the memory of a cast that autocast keeps: its tensor's, and the one by which it is looked at


@dataclass(frozen=True)
class _Cast:
    memory: StorageWeakRef
    num_bytes: int
    dtype: torch.dtype
    part: int
    entry: UnitEntry


class UnitCasts:
    """Of one rank, while a chunk is computed."""

    def __init__(self) -> None:
        self._of_units: dict[int, dict[int, _Cast]] = {}  # by the unit's number and the memory
        self._users: dict[int, StorageWeakRef] = {}

    def made_by_user(self, made: object) -> None:
        """A result of the user's own call: it may be anywhere."""
        if isinstance(made, Tensor) and made.layout == torch.strided and cast_of(made) is not None:
            memory = StorageWeakRef(made.untyped_storage())
            self._users[memory.cdata] = memory

    def used(self, unit: Unit, part: int, entry: UnitEntry, tensor: Tensor) -> None:
        """An operator saves a cast of the parameter at that place for backward, or a view of it."""
        storage = tensor.untyped_storage()
        memory = StorageWeakRef(storage)
        if memory.cdata not in self._users:
            cast = _Cast(memory, storage.nbytes(), tensor.dtype, part, entry)
            self._of_units.setdefault(unit.number, {}).setdefault(memory.cdata, cast)

    def let_go(self, unit: Unit) -> None:
        """The unit's values are not needed until further notice."""
        for _, storage in self._there(unit.number):
            storage.resize_(0)

    def fill(self, unit: Unit) -> None:
        """The unit's values are here again."""
        assert unit.values is not None
        for each, storage in self._there(unit.number):
            if not storage.nbytes():
                storage.resize_(each.num_bytes)
                values = unit.values[each.part][each.entry.start : each.entry.stop]
                with torch.no_grad():
                    whole: Any = values.new_empty(0, dtype=each.dtype)
                    whole.set_(storage, 0, values.shape).copy_(values)

    def clear(self) -> None:
        """The chunk has been computed. Where autocast keeps casts for other simulated ranks, which are still in their losses, it must
        forget ours, too: their memory is gone."""
        if any(True for number in self._of_units for _ in self._there(number)):
            torch.clear_autocast_cache()
        self._of_units, self._users = {}, {}

    def _there(self, number: int) -> Iterator[tuple[_Cast, torch.UntypedStorage]]:
        """The casts that autocast still keeps, and nobody else."""
        for each in self._of_units.get(number, {}).values():
            storage = _torch.UntypedStorage._new_with_weak_ptr(each.memory.cdata)
            if storage is not None and _torch._C._storage_Use_Count(storage._cdata) == _OWN:
                yield each, storage
