"""Records what operators allocate and when it is freed, as pieces of memory that fake tensors would have."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshloom.program.cost.cost_fake import Calls, tensors_in
from meshloom.program.ir.sparse_constants import memory_of, storage_of

# bytes allocated, or freed if negative; and those of what is neither saved for backward nor a gradient
Event = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Noted:
    """before: pieces that existed. log: (node, piece) when it is allocated, and its complement when it is
    freed."""

    before: tuple[int, ...]
    log: list[tuple[int, int]]


class Life:
    """What is allocated while `noted` is open. A piece of memory is a number. ignored: tensors that exist
    throughout, and are no pieces."""

    def __init__(self, ignored: Sequence[Tensor]) -> None:
        # referenced, or another piece might get the address of one that is freed, and be ignored with it
        self._ignored = list(ignored)
        # memory -> piece; None: not looked at
        self._pieces: dict[int, int | None] = dict.fromkeys(map(memory_of, ignored))
        self._references: dict[int, Any] = {}
        self._sizes: list[int] = []
        self._makers: list[int] = []
        self._alive: dict[int, None] = {}
        self._log: list[tuple[int, int]] = []
        self._node = 0

    @property
    def alive(self) -> set[int]:
        """The pieces that exist now."""
        return set(self._alive)

    @contextmanager
    def noted(self, here: Callable[[], int | None]) -> Generator[Noted]:
        """Records what happens inside. here: the number of the node that it happens for; None: the last one."""
        self._log = []
        noted = Noted(before=tuple(self._alive), log=self._log)
        with _Seeing(self, here):
            yield noted

    def pieces_of(self, tensors: Iterable[Tensor]) -> set[int]:
        """The pieces that contain these tensors."""
        return {piece for each in tensors if (piece := self._pieces.get(memory_of(each))) is not None}

    def maker(self, piece: int) -> int:
        """The node that allocated a piece."""
        return self._makers[piece]

    def event(self, piece: int, known: set[int]) -> Event:
        """The allocation of a piece; of its complement, its end. known: what is saved or a gradient."""
        of, sign = (piece, 1) if piece >= 0 else (~piece, -1)
        return sign * self._sizes[of], 0 if of in known else sign * self._sizes[of]

    def bytes_by_node(self, pieces: Iterable[int]) -> Mapping[int, int]:
        """Node -> bytes of these pieces that it allocated."""
        found: dict[int, int] = {}
        for piece in pieces:
            found[self._makers[piece]] = found.get(self._makers[piece], 0) + self._sizes[piece]
        return found

    def see(self, tensor: Tensor, node: int | None) -> None:
        """Records a tensor that a node received or allocated."""
        self._node = node = self._node if node is None else node
        memory = memory_of(tensor)
        if memory in self._pieces:
            return
        storage = storage_of(tensor)
        piece = len(self._sizes)
        self._sizes.append(storage.nbytes())
        self._makers.append(node)
        self._pieces[memory] = piece
        self._alive[piece] = None
        self._log.append((node, piece))

        def freed(_: Any) -> None:
            if self._pieces.get(memory) == piece:
                del self._pieces[memory], self._references[memory]
                del self._alive[piece]
                self._log.append((self._node, ~piece))

        self._references[memory] = weakref.ref(storage, freed)


class _Seeing(Calls):
    def __init__(self, life: Life, here: Callable[[], int | None]) -> None:
        super().__init__()
        self._life = life
        self._here = here

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], value: Any) -> None:
        node = self._here()
        for tensor in tensors_in(value):
            self._life.see(tensor, node)
