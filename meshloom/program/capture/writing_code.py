"""Whether the code of a loss may write tensors that its model keeps, as far as its names tell: a mask on a weight, a
teacher's average, an embedding's `max_norm`.

Followed are functions and methods of the user's that the loss and the forwards name, so that how a model is made and
filled (`_init_weights`) does not count.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from meshloom.core.job import LossFunction
from meshloom.program.ir.lines import is_users

_TELLING = {
    "data",
    "no_grad",
    "inference_mode",
    "init",
    "embedding",
    "embedding_bag",
    "load_state_dict",
    "setattr",
    "Parameter",
}
_TORCH = os.path.dirname(torch.__file__)
_TYPED = ("<stdin", "<ipython", "<doctest", "<string")  # code that a user has typed, or executes
_HARMLESS = {"requires_grad_", "unsqueeze_", "squeeze_"}  # they write no values


def may_write(loss: LossFunction, model: nn.Module) -> bool:
    """Whether a function that it may call names something that writes, or that hides a write from autograd.

    >>> may_write(lambda model, batch: model(batch).sum(), nn.Linear(2, 3))
    False
    >>> may_write(lambda model, batch: model.weight.data.mul_(0.5), nn.Linear(2, 3))
    True
    """
    methods: dict[str, list[FunctionType]] = {}  # of the model's modules and the loss, by name
    waiting: list[FunctionType] = []
    owners: set[type] = {type(each) for each in model.modules()}
    while isinstance(loss, partial):
        owners |= {type(each) for each in (*loss.args, *loss.keywords.values())}
        loss = loss.func
    owners.add(type(getattr(loss, "__self__", loss)))
    for kind in {base for owner in owners for base in owner.__mro__ if not _is_torchs(base)}:
        for name, value in vars(kind).items():
            for function in _functions_of(value, of_package=True):
                methods.setdefault(name, []).append(function)
                if name in ("forward", "__call__"):
                    waiting.append(function)
    waiting += _functions_of(loss)
    for module in model.modules():
        for value in list(vars(module).values()):
            waiting += _functions_of(value)
    seen: set[CodeType] = set()
    while waiting:
        function = waiting.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        names = set(_names(function.__code__))
        if any(map(_tells, names)):
            return True
        for cell in function.__closure__ or ():
            try:
                waiting += _functions_of(cell.cell_contents)
            except ValueError:  # empty
                continue
        for name in names:
            waiting += methods.get(name, ())
            waiting += _of_global(function.__globals__.get(name), names)
    return False


def _tells(name: str) -> bool:
    written = name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
    return name in _TELLING or written or name.startswith("_foreach")


def _of_global(value: Any, names: set[str]) -> Iterator[FunctionType]:
    """What code may call of a global that it names: a function, a class or its methods, or those of a module."""
    if isinstance(value, ModuleType) and is_users(getattr(value, "__file__", None) or ""):
        for name in names & vars(value).keys():
            yield from _functions_of(vars(value)[name])
    elif isinstance(value, type) and _is_users_class(value):
        for each in vars(value).values():
            yield from _functions_of(each)
    else:
        yield from _functions_of(value)


def _functions_of(value: Any, *, of_package: bool = False) -> list[FunctionType]:
    """A function or method of the user's, or of any package, and what it is put around."""
    function = getattr(value, "__func__", value)
    if isinstance(function, property):
        return _functions_of(function.fget, of_package=of_package)
    if not isinstance(function, FunctionType):
        return []
    inner = _functions_of(vars(function).get("__wrapped__"), of_package=of_package)
    if inner and function.__code__.co_filename.startswith(_TORCH):  # `torch.no_grad` around it
        return [_hidden, *inner]
    return [function, *inner] if of_package or _is_followed(function.__code__.co_filename) else []


def _is_followed(file: str) -> bool:
    return is_users(file) or file.startswith(_TYPED)


def _hidden() -> None:
    no_grad: Any = None
    no_grad.no_grad()


def _is_users_class(kind: type) -> bool:
    return _is_followed(_file(kind)) or kind.__module__ == "__main__"


def _is_torchs(kind: type) -> bool:
    return kind is object or kind.__module__.split(".")[0] in ("torch", "builtins", "meshloom")


def _file(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or "<>"


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)
