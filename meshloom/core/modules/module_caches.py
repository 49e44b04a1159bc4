"""What the user's Python modules keep between calls must not be tensors of a trace or a recording, which have no values.

@lru_cache
def causal(n): ...      a function that keeps its results

MASKS = {}              a container that code fills
"""

from __future__ import annotations

import copy
import functools
import gc
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_DEPTH = 4  # of containers in containers
_MOST = 4096  # entries of a container that code fills with results; those of data are longer
_Cached: Any = functools._lru_cache_wrapper  # pyright: ignore[reportPrivateUsage]


@contextmanager
def no_tensors_kept() -> Iterator[None]:
    """The user's modules keep no tensor afterwards that they have not kept before."""
    spaces = list(_namespaces())
    misses = {id(each): each.cache_info().misses for each in _caches(spaces)}
    containers = _containers(spaces)
    before = [(each, copy.copy(each), {id(tensor) for tensor in _tensors_in(each)}) for each in containers]
    try:
        yield
    finally:
        for cached in _caches(spaces):
            if cached.cache_info().misses != misses.get(id(cached), 0) and _results_have_tensors(cached):
                cached.cache_clear()
        for container, content, known in before:
            if any(id(tensor) not in known for tensor in _tensors_in(container)):
                container.clear()
                (container.update if isinstance(container, dict) else container.extend)(content)


def _namespaces() -> Iterator[dict[str, Any]]:
    """Of the user's modules, and of the classes that they define."""
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or not _is_users(name, vars(module).get("__file__")):
            continue
        yield vars(module)
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__ == name:
                yield dict(vars(value))


def _caches(namespaces: Iterable[dict[str, Any]]) -> Iterator[Any]:
    for namespace in namespaces:
        for value in list(namespace.values()):
            if isinstance(value, _Cached):
                yield value


def _containers(namespaces: Iterable[dict[str, Any]]) -> Iterator[Any]:
    for namespace in namespaces:
        for name, value in list(namespace.items()):
            if type(value) in (dict, list) and len(value) <= _MOST and not name.startswith("__"):
                yield value


def _results_have_tensors(cached: Any) -> bool:
    found = [cached]
    for _ in range(_DEPTH):
        found = [
            each for one in found for each in gc.get_referents(one) if not isinstance(each, type | ModuleType)
        ]
        if any(isinstance(each, Tensor) for each in found):
            return True
        found = [each for each in found if not callable(each)]
    return False


def _tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple) and depth < _DEPTH:
        for each in list(value.values() if isinstance(value, dict) else value):
            yield from _tensors_in(each, depth + 1)


@functools.cache
def _is_users(name: str, file: str | None) -> bool:
    """Whether a module is neither of Python's, of torch's, of this package nor an installed one."""
    if file is None or name.split(".")[0] == "meshloom":
        return False
    return "site-packages" not in file and "dist-packages" not in file and not file.startswith(_OTHERS)


_OTHERS = (sysconfig.get_path("stdlib"), str(Path(torch.__file__).parent))
