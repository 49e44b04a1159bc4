"""What a model function refers to: in globals, in what it closes over, in functions that keep what they return."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import islice
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from meshloom.core.modules.model_parts import has_memory, memory_of

DEPTH = 4
FEW = 256  # entries of a container that are looked at
_MOST = 50_000  # values that are looked at
_NEAR = 2  # how deep a function lies of which the globals are looked at


class KnownElsewhere:
    """What a model function refers to, and what is in the files of its model's classes. made: `id` of modules that it has made, which are not looked into."""

    def __init__(self, function: Callable[[], nn.Module], model: nn.Module, made: Collection[int]) -> None:
        self._made = made
        self._seen: dict[int, Any] = {}  # what is in it stays alive, so that no identity is used again
        self._memories: dict[int, Tensor] = {}
        self._look_into(function, 0)
        for name in {type(each).__module__ for each in model.modules()}:
            if name.partition(".")[0] != "torch" and name in sys.modules:
                self._look_into_all(vars(sys.modules[name]).values(), 0)

    def has(self, value: Any) -> bool:
        """Whether it is found there."""
        return id(value) in self._seen

    def in_memory_of(self, tensor: Tensor) -> Tensor | None:
        """The tensor itself, if it is found there, or another one in its memory."""
        return tensor if self.has(tensor) else self._memories.get(memory_of(tensor))

    def _look_into_all(self, values: Iterable[Any], depth: int) -> None:
        for each in list(values):
            self._look_into(each, depth)

    def _look_into(self, value: Any, depth: int) -> None:
        if depth > DEPTH or len(self._seen) > _MOST or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if has_memory(value):
            self._memories.setdefault(memory_of(value), value)
        elif id(value) not in self._made:
            self._look_into_all(inside(value, depth), depth + 1)


def inside(value: Any, depth: int) -> Iterator[Any]:
    """What a value refers to."""
    if isinstance(value, FunctionType):
        yield from near(value)
        if depth <= _NEAR and (value.__module__ or "").partition(".")[0] != "torch":
            yield from value.__globals__.values()
    elif isinstance(value, dict):
        yield from islice(dict[Any, Any].values(value), FEW)
    elif type(value) in (list, tuple, set, frozenset):
        yield from islice(value, FEW)
    elif isinstance(value, nn.Module):
        for each in value.modules():
            yield each
            yield from (*each.parameters(recurse=False), *each.buffers(recurse=False))
    elif type(value).__name__ in (
        "_lru_cache_wrapper",
        "_lru_list_elem",
    ):  # functions that keep what they return
        yield from gc.get_referents(value)
    elif isinstance(value, MethodType | partial):
        yield from near(value)
    elif not isinstance(value, ModuleType):
        yield from getattr(value, "__dict__", {}).values()


def near(function: Any) -> Iterator[Any]:
    """What a function refers to besides globals: what it closes over, its defaults, whose method it is."""
    if isinstance(function, FunctionType):
        yield from map(_content, function.__closure__ or ())
        yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    elif isinstance(function, MethodType):
        yield from (function.__func__, function.__self__)
    elif isinstance(function, partial):
        yield from (function.func, *function.args, *function.keywords.values())


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
