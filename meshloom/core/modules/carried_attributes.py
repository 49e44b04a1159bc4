"""Plain attributes in which a module's forward leaves tensors for its next one."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

_DEPTH = 3  # of tuples in tuples
_NAMES: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()  # of classes that were asked for
Place = tuple[str, nn.Module, str]


def carrying_places(model: nn.Module) -> list[Place]:
    """(path, module, attribute) of what code of the model's classes, but for constructors, both reads and sets, where it
    holds nothing or tensors without gradients."""
    return [
        (path, module, name)
        for path, module in model.named_modules()
        for name in sorted(_names(type(module)))
        if name not in _registered(module) and is_carried(vars(module).get(name))
    ]


def is_carried(value: Any, depth: int = 0) -> bool:
    """Whether a value is nothing, or tensors without gradients."""
    if value is None or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter)):
        return value is None or not value.requires_grad
    return (
        isinstance(value, tuple | list)
        and depth < _DEPTH
        and all(is_carried(each, depth + 1) for each in value)
    )


def _registered(module: nn.Module) -> set[str]:
    return {name for kind in ("_parameters", "_buffers", "_modules") for name in vars(module).get(kind, ())}


def _names(kind: type) -> frozenset[str]:
    """Names of attributes that methods of a class both read and set."""
    if kind not in _NAMES:
        bases = [
            each for each in kind.__mro__ if each is not object and each.__module__.split(".")[0] != "torch"
        ]
        methods = (each for base in bases for name, each in vars(base).items() if name != "__init__")
        functions = [getattr(each, "__wrapped__", each) for each in methods]
        codes = [each.__code__ for each in functions if isinstance(each, FunctionType)]
        read = {name for code in codes for name in _read(code)}
        _NAMES[kind] = frozenset(read & {name for code in codes for name in _set(code)})
    return _NAMES[kind]


def _read(code: CodeType) -> Iterator[str]:
    yield from (each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_ATTR")
    yield from (each for each in code.co_consts if isinstance(each, str))  # getattr(self, "memory", None)


def _set(code: CodeType) -> Iterator[str]:
    yield from (each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR")
