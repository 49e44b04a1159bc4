"""What functions and classes add to a digest: their code and the globals and closures that it reads."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Protocol

from torch import nn

from meshloom.core.cache import digest_of
from meshloom.program.capture.outside import Reads, reads_of
from meshloom.program.ir.lines import is_users

_OF_GENERIC_CLASSES = {"_abc_impl", "__abstractmethods__", "__parameters__", "__orig_bases__"}
_OF_ALL_CLASSES = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__"}
_GENERIC_ATTRIBUTES = _OF_ALL_CLASSES | _OF_GENERIC_CLASSES


class Digest(Protocol):
    """The digest under construction."""

    def put(self, *facts: Any) -> None:
        """Add the text of these facts."""
        ...

    def add(self, value: Any, where: str) -> object:
        """Add a value. where: its description in error messages."""
        ...


def add_function(digest: Digest, function: FunctionType, where: str) -> None:
    """Add a function with its defaults and closure; if it is the user's own, also its code and globals."""
    digest.put(function.__module__, function.__qualname__)
    for each in (function.__defaults__, function.__kwdefaults__):
        digest.add(each, f"a default of {where}")
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            found = cell.cell_contents
        except ValueError:  # empty
            continue
        digest.put(name)
        digest.add(found, f"{name}, which {where} uses,")
    if not _is_own(function.__module__, function.__code__.co_filename):
        return
    _add_code(digest, function.__code__)
    reads = reads_of(function.__code__)
    for name in reads.names:
        if name in function.__globals__ and not name.startswith("__"):
            digest.put(name)
            _add_global(digest, function.__globals__[name], f"{name}, which {where} uses,", reads)


def add_class(digest: Digest, kind: type) -> None:
    """Add a class without its bases. A class of a package counts by its name and by what the user has
    patched into it; an `nn.Module` of a package also by its source file."""
    digest.put("class", kind.__module__, kind.__qualname__)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    own = _is_own(kind.__module__, file or "<none>")
    of_package = not own and not kind.__module__.startswith(("torch.", "meshloom."))
    if file and of_package and issubclass(kind, nn.Module):
        digest.put(digest_of(Path(file).read_bytes()))
    for name, value in vars(kind).items():
        functions = [
            each
            for each in _functions_in(value)
            if own or _is_own(each.__module__, each.__code__.co_filename)
        ]
        for function in functions:
            digest.put(name)
            digest.add(function, f"{kind.__qualname__}.{name}")
        if own and not functions and name not in _GENERIC_ATTRIBUTES and not hasattr(type(value), "__get__"):
            digest.put(name)
            digest.add(value, f"{kind.__qualname__}.{name}")


def _add_global(digest: Digest, value: Any, where: str, reads: Reads) -> None:
    """Add a global; of a module of the user's, also the attributes that the code may read."""
    digest.add(value, where)
    if isinstance(value, ModuleType) and is_users(getattr(value, "__file__", None) or ""):
        for name in reads.attributes:
            if name in vars(value):
                digest.put(name)
                digest.add(vars(value)[name], f"{value.__name__}.{name}")


def _add_code(digest: Digest, code: CodeType) -> None:
    digest.put(
        code.co_name, code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, code.co_flags
    )
    for each in code.co_consts:
        _add_code(digest, each) if isinstance(each, CodeType) else digest.add(each, "a constant")


def _is_own(module: str | None, file: str) -> bool:
    """Whether code is the user's, including code that was typed in or compiled by `exec`."""
    if not file.startswith("<"):
        return is_users(file)
    source = getattr(sys.modules.get(module or ""), "__file__", None)
    if isinstance(source, str):
        return is_users(source)
    return source is None and module not in sys.builtin_module_names


def _functions_in(value: Any) -> list[FunctionType]:
    """The functions in a class attribute."""
    if isinstance(value, property):
        found: list[Any] = [value.fget, value.fset]
    elif isinstance(value, functools.cached_property):
        found = [value.func]
    else:
        found = [getattr(value, "__func__", value)]
    return [each for each in found if isinstance(each, FunctionType)]
