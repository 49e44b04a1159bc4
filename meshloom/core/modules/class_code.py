"""What the code of a module's class does with attributes: the names that its methods read.

Constructors and torch's own classes are left out: they say nothing of what the user's forwards do.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]

_NORMS = {"batch_norm", "instance_norm"}
_READ: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()  # of classes that were asked for


def names_read(kind: type) -> frozenset[str]:
    """Names of attributes that methods of a class read; also texts, as of `getattr(self, "memory", None)`."""
    if kind not in _READ:
        _READ[kind] = frozenset(name for code in _codes(kind) for name in _read(code))
    return _READ[kind]


def has_batch_norms(modules: Iterable[nn.Module]) -> bool:
    """Whether one of them is a batch or instance norm, or calls one."""
    return any(isinstance(each, _NormBase) or not _NORMS.isdisjoint(_names(each)) for each in modules)


def code_of_forward(module: nn.Module) -> CodeType | None:
    """That of its class; None: it is scripted, or has none."""
    code = getattr(getattr(type(module), "forward", None), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _names(module: nn.Module) -> Sequence[str]:
    code = code_of_forward(module)
    return code.co_names if code else ()


def _read(code: CodeType) -> Iterator[str]:
    for each in dis.get_instructions(code):
        # since Python 3.12 the lowest bit says that a method is looked up, which had an instruction of its own
        if each.opname == "LOAD_ATTR" and not (sys.version_info >= (3, 12) and (each.arg or 0) & 1):
            yield each.argval
    yield from (each for each in code.co_consts if isinstance(each, str))
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _read(each)


def _codes(kind: type) -> Iterator[CodeType]:
    for base in kind.__mro__:
        if base.__module__.split(".")[0] in ("torch", "builtins"):
            continue
        for name, each in vars(base).items():
            function: Any = getattr(each, "__wrapped__", each)
            if name != "__init__" and isinstance(function, FunctionType):
                yield function.__code__
