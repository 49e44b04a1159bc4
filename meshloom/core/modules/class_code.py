"""What code reads and sets, by the names in its instructions: globals, variables of closures, attributes, entries.

count += 1; self.scale; log["loss"] = x       reads and sets `count`, reads `scale`, sets `loss`
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]

Lines = dict[str, tuple[str, int, str]]  # name -> file, number and function of the first line
_NORMS = {"batch_norm", "instance_norm"}
_READ: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()  # of classes that were asked for
_VARIABLES = {"LOAD_GLOBAL": "names", "LOAD_NAME": "names", "LOAD_DEREF": "cells", "LOAD_CLASSDEREF": "cells"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"}
_STORES = {"STORE_GLOBAL", "STORE_NAME", "STORE_DEREF", "STORE_ATTR"}
# methods of containers that change them and return nothing
_CHANGING = {"append", "extend", "add", "update", "insert", "clear", "remove", "discard"}


@dataclass(frozen=True, kw_only=True)
class Reads:
    """What a piece of code reads and sets, including the functions defined in it.

    names: globals. cells: closure variables. attributes: of any object; of_others: of another than `self`. constants: texts in it.
    whole: those of which more is used than that entries are set (`log["loss"] = x`). stored: variables and attributes that it sets, or whose
    entries. near: names on lines that set entries.
    paths: globals and closure variables with the attributes that are read of them in a row: ("time", "perf_counter").
    """

    names: Lines = field(default_factory=Lines)
    cells: Lines = field(default_factory=Lines)
    attributes: Lines = field(default_factory=Lines)
    of_others: Lines = field(default_factory=Lines)
    constants: Lines = field(default_factory=Lines)
    whole: Lines = field(default_factory=Lines)
    stored: Lines = field(default_factory=Lines)
    near: Lines = field(default_factory=Lines)
    paths: dict[tuple[str, ...], tuple[str, int, str]] = field(default_factory=dict)


@lru_cache(maxsize=4096)
def reads_of(code: CodeType) -> Reads:
    """The reads of a function's code.

    >>> reads = reads_of((lambda self: self.scale * LIST[0]).__code__)
    >>> list(reads.names), list(reads.attributes), list(reads.of_others)
    (['LIST'], ['scale'], [])
    """
    found = Reads()
    instructions = list(dis.get_instructions(code))
    entries = {_number(each) for each in instructions if each.opname == "STORE_SUBSCR"}
    for at, each in enumerate(instructions):
        here, following = (code.co_filename, _number(each), code.co_name), instructions[at + 1 : at + 3]
        if each.opname in _STORES:
            found.stored.setdefault(each.argval, here)
        elif each.opname == "LOAD_CONST" and isinstance(each.argval, str):
            if not following or following[0].opname != "STORE_SUBSCR":
                found.constants.setdefault(each.argval, here)
        elif each.opname in _VARIABLES or each.opname in _ATTRIBUTES:
            kind = _VARIABLES.get(each.opname, "attributes")
            (found.stored if _changes(following) else found.whole).setdefault(each.argval, here)
            getattr(found, kind).setdefault(each.argval, here)
            if kind != "attributes":
                found.paths.setdefault((each.argval, *_row(instructions[at + 1 :])), here)
            elif not _is_of_self(instructions, at):
                found.of_others.setdefault(each.argval, here)
        else:
            continue
        if here[1] in entries:
            found.near.setdefault(each.argval, here)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            for name, inner in vars(reads_of(constant)).items():
                mine = vars(found)[name]
                mine.update({key: line for key, line in inner.items() if key not in mine})
    return found


def names_read(kind: type) -> frozenset[str]:
    """Names of attributes that methods of a class read; also texts, as of `getattr(self, "memory", None)`. Constructors and torch's own
    classes are left out: they say nothing of what the user's forwards do."""
    if kind not in _READ:
        reads = [reads_of(code) for code in _codes(kind)]
        _READ[kind] = frozenset(name for each in reads for name in (*each.attributes, *each.constants))
    return _READ[kind]


def has_batch_norms(modules: Iterable[nn.Module]) -> bool:
    """Whether one of them is a batch or instance norm, or calls one."""
    return any(isinstance(each, _NormBase) or not _NORMS.isdisjoint(_names(each)) for each in modules)


def _names(module: nn.Module) -> Sequence[str]:
    code = getattr(
        getattr(type(module), "forward", None), "__code__", None
    )  # None: it is scripted, or has none
    return code.co_names if isinstance(code, CodeType) else ()


def _number(instruction: dis.Instruction) -> int:
    return (instruction.positions and instruction.positions.lineno) or 0


def _changes(following: Sequence[dis.Instruction]) -> bool:
    """Whether these, after a container was loaded, set one of its entries."""
    if not following or following[0].opname in _ATTRIBUTES:
        return bool(following) and following[0].argval in _CHANGING
    return following[0].opname.startswith("LOAD") and [each.opname for each in following[1:]] == [
        "STORE_SUBSCR"
    ]


def _is_of_self(instructions: Sequence[dis.Instruction], at: int) -> bool:
    """Whether the attribute that is loaded there is one of `self`; `self.calls += 1` copies it first."""
    before = [each for each in instructions[max(at - 2, 0) : at] if each.opname != "COPY"]
    return bool(before) and before[-1].argval == "self"


def _row(following: Sequence[dis.Instruction]) -> Iterator[str]:
    for each in following:
        if each.opname not in _ATTRIBUTES:
            return
        yield each.argval


def _codes(kind: type) -> Iterator[CodeType]:
    for base in kind.__mro__:
        if base.__module__.split(".")[0] in ("torch", "builtins"):
            continue
        for name, each in vars(base).items():
            function: Any = getattr(each, "__wrapped__", each)
            if name != "__init__" and isinstance(function, FunctionType):
                yield function.__code__
