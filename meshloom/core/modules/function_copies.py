"""Copies of functions of the user's with copies of what they refer to, so that trying one changes nothing of the original's."""

from __future__ import annotations

import copy
import dis
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from meshloom.core.modules.packages import is_of_package

_MOST_ELEMENTS = 1 << 22  # of tensors that one value may hold


class NotCopiedError(Exception):
    """A function refers to what cannot be copied, to large tensors, or to tensors that it is to reach through its arguments."""


def copied_function(function: Callable[..., Any], memo: dict[int, Any], apart: Iterable[Tensor]) -> Callable[..., Any]:  # fmt: skip
    """A copy of a function, a method, or another callable object. Functions of libraries are taken as they are.

    memo: of `copy.deepcopy`: copies by the ids of their originals, to which those that are made are added. apart: tensors that it must not
    refer to. Raises `NotCopiedError`.
    """
    ids = {id(each) for each in apart}
    try:
        found = _copied(function, memo, ids)
    except NotCopiedError:
        raise
    except Exception as error:  # what an object raises that is not to be copied is its own affair
        raise NotCopiedError(f"{type(error).__name__}: {error}") from error
    if ids & memo.keys():
        raise NotCopiedError("it refers to them by itself")
    return found


def _copied(value: Any, memo: dict[int, Any], apart: set[int]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, types.FunctionType):
        return value if _is_of_library(value) else _copied_code(value, memo, apart)
    if isinstance(value, types.MethodType):
        return types.MethodType(_copied(value.__func__, memo, apart), _copied(value.__self__, memo, apart))
    if isinstance(value, partial):
        given: partial[Any] = cast(Any, value)
        arguments = [_copied(each, memo, apart) for each in given.args]
        return partial(_copied(given.func, memo, apart), *arguments, **_each(given.keywords, memo, apart))
    if isinstance(value, types.ModuleType | types.BuiltinFunctionType | type):
        return value
    tensors = [*_tensors_of(value)]
    if any(id(each) in apart for each in tensors):
        raise NotCopiedError("it refers to them by itself")
    if sum(map(Tensor.numel, tensors)) > _MOST_ELEMENTS:
        raise NotCopiedError("it refers to large tensors")
    return copy.deepcopy(value, memo)


def _copied_code(function: types.FunctionType, memo: dict[int, Any], apart: set[int]) -> types.FunctionType:
    theirs = function.__globals__
    mine: dict[str, Any] = memo.setdefault(id(theirs), dict(theirs))  # one copy for all functions of a module
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    copied = types.FunctionType(function.__code__, mine, function.__name__, None, cells or None)
    memo[id(function)] = copied  # before what may refer to it
    copied.__defaults__ = tuple(_copied(each, memo, apart) for each in function.__defaults__ or ()) or None
    copied.__kwdefaults__ = _each(function.__kwdefaults__ or {}, memo, apart) or None
    for cell, own in zip(function.__closure__ or (), cells, strict=True):
        if id(cell) in memo:
            raise NotCopiedError("several functions share a variable")
        try:
            own.cell_contents = _copied(cell.cell_contents, memo, apart)
        except ValueError:  # the variable has no value yet
            continue
    for name in _globals_of(function.__code__):
        if name in theirs and mine[name] is theirs[name]:
            mine[name] = _copied(theirs[name], memo, apart)
    return copied


def _each(values: Mapping[str, Any], memo: dict[int, Any], apart: set[int]) -> dict[str, Any]:
    return {name: _copied(each, memo, apart) for name, each in values.items()}


def _globals_of(code: types.CodeType) -> Iterator[str]:
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"):
            yield str(each.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_of(constant)


def _tensors_of(value: Any, depth: int = 2) -> Iterator[Tensor]:
    """Those that are easily found."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, Optimizer):
        yield from (each for group in value.param_groups for each in group["params"])
    elif depth:
        values: Any = value if isinstance(value, list | tuple | set | frozenset) else ()
        values = cast(Any, value).values() if isinstance(value, dict) else values
        values = vars(value).values() if not values and hasattr(value, "__dict__") else values
        for each in values:
            yield from _tensors_of(each, depth - 1)


def _is_of_library(function: types.FunctionType) -> bool:
    name = (function.__module__ or "").partition(".")[0]
    return name in sys.stdlib_module_names or is_of_package(function.__code__.co_filename)
