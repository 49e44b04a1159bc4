"""What the user's Python modules keep between calls must not be tensors of a trace or a description, which have no values.

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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from meshloom.core.modules.packages import is_of_package

_DEPTH = 4  # of containers in containers
_MOST = 4096  # entries of a container that code fills with results; those of data are longer
_Cached: Any = functools._lru_cache_wrapper  # pyright: ignore[reportPrivateUsage]


@contextmanager
def no_tensors_kept() -> Iterator[None]:
    """The user's modules keep no tensor afterwards that they have not kept before."""
    spaces = _namespaces()
    misses = {id(each): each.cache_info().misses for each in _caches(spaces)}
    before = [(each, copy.copy(each), set(map(id, _tensors_in(each)))) for each in _containers(spaces)]
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


def _namespaces() -> list[Mapping[str, Any]]:
    """Of the user's modules, and of the classes that they define."""
    found: list[Mapping[str, Any]] = []
    for name in sys.modules.keys() - _others:
        module = sys.modules.get(name)
        file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if module is None or file is None:
            continue
        if not _is_users(name, file):
            _others.add(name)
            continue
        found.append(vars(module))
        values = list(vars(module).values())
        found += [vars(each) for each in values if isinstance(each, type) and each.__module__ == name]
    return found


def _caches(namespaces: Iterable[Mapping[str, Any]]) -> list[Any]:
    return [value for each in namespaces for value in list(each.values()) if isinstance(value, _Cached)]


def _containers(namespaces: Iterable[Mapping[str, Any]]) -> list[Any]:
    return [
        value
        for namespace in namespaces
        for name, value in list(namespace.items())
        if type(value) in (dict, list) and len(value) <= _MOST and not name.startswith("__")
    ]


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


def _tensors_in(container: Any) -> list[Tensor]:
    """In it and in containers within it, level by level: a module's tables may have many thousands of entries."""
    found, level = list[Tensor](), [container]
    for _ in range(_DEPTH):
        within = gc.get_referents(*level)
        kinds = set(map(type, within))
        tensors = {each for each in kinds if issubclass(each, Tensor)}
        containers = {each for each in kinds if issubclass(each, dict | list | tuple)}
        if tensors:
            found += [each for each in within if type(each) in tensors]
        if not containers:
            break
        level = [each for each in within if type(each) in containers]
    return found


_others: set[str] = set()  # names of modules that are not the user's


def _is_users(name: str, file: str) -> bool:
    """Whether a module is neither of Python's, of torch's, of this package nor an installed one."""
    installed = is_of_package(file) or file.startswith(_OTHERS)
    return not installed and name.split(".")[0] != "meshloom"


_OTHERS = (sysconfig.get_path("stdlib"), str(Path(torch.__file__).parent))
