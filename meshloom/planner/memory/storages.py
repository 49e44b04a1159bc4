"""Memory that comes and goes while operators run on tensors without values: every storage from the call that makes it to its end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from meshloom.program.cost.cost_fake import Calls, tensors_in
from meshloom.program.ir.sparse_constants import memory_of, storage_of

# bytes that come, or go if negative; and whether they come and go within what is followed
Event = tuple[int, bool]


class Storages(Calls):
    """standing: what is there all the time."""

    def __init__(self, standing: Iterable[Tensor]) -> None:
        super().__init__()
        self._standing = [*standing]  # or other memory might get their addresses
        self._known: dict[int, int] = dict.fromkeys(map(memory_of, self._standing), -1)
        self._references: dict[int, Any] = {}
        self._sizes: list[int] = []
        self._log: list[tuple[int, int]] = []

    def followed(self, run: Callable[[], None]) -> tuple[Event, ...]:
        """What comes and goes meanwhile, in order."""
        self._log = log = []
        with self:
            run()
        passing = {piece for piece, sign in log if sign > 0} & {piece for piece, sign in log if sign < 0}
        return tuple((sign * self._sizes[piece], piece in passing) for piece, sign in log)

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], value: Any) -> None:
        for tensor in tensors_in(value):
            if (memory := memory_of(tensor)) not in self._known:
                self._begin(memory, storage_of(tensor))

    def _begin(self, memory: int, storage: Any) -> None:
        piece = self._known[memory] = len(self._sizes)
        self._sizes.append(int(storage.nbytes()))
        self._log.append((piece, 1))

        def ended(_: Any) -> None:
            del self._known[memory], self._references[piece]
            self._log.append((piece, -1))

        self._references[piece] = weakref.ref(storage, ended)


def most_of(events: Iterable[Event]) -> tuple[int, int]:
    """The most bytes at one time beyond those before, and those of them that come and go within the events."""
    total = passing = 0
    found = (0, 0)
    for size, passes in events:
        total += size
        passing += size if passes else 0
        found = max(found, (total, passing))
    return found


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of their distinct memories."""
    return sum({memory_of(each): int(storage_of(each).nbytes()) for each in tensors}.values())
