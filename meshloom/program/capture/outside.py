"""Watches what a loss reads besides the model's tensors and the batch: plain values and tensors in closures,
globals and attributes, compared in every step.

A program keeps such a value as it was at the capture. They are found in the code of the loss, of the model's
modules and of the user's functions that these name:

    def loss(model, batch):
        return criterion(model(batch["x"] * data.scale), batch["y"]) * WEIGHTS["main"]

reads `data.scale` and `WEIGHTS["main"]`. Only loads count: the loss may write `history["loss"] = ...`.
"""

from __future__ import annotations

import dis
import enum
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
from torch import Tensor, nn

from meshloom.core.errors import CaptureError, TrainingError
from meshloom.core.modules.class_code import code_of_forward
from meshloom.program.ir.lines import WAY_OUT, is_users
from meshloom.program.ir.nodes import submodule

MOST = 64  # entries of a container that are looked at
DEPTH = 8


@dataclass(frozen=True)
class OutsideChange:
    """A value that a loss reads has changed."""

    name: str
    before: str
    after: str


class ChangedWhileReadError(CaptureError):
    """A loss changes what it reads: no program, and no part that runs as written, would do that as one device does."""


class Outside:
    """The current values of what `function` and `model` read. opaque: modules that programs run as they are."""

    def __init__(
        self, function: Callable[..., Any], model: nn.Module | None = None, opaque: Collection[str] = ()
    ) -> None:
        self._places: list[_Place] = []
        self._paths: dict[int, str] = {}  # of the model's modules
        # by identity; what is in it stays alive, so that no identity is used again
        self._seen: dict[Any, Any] = {}
        self._walk(function, "the loss", None, _NOTHING, 0)
        if model is not None:
            self._walk_model(model, opaque)
        self._seen.clear()

    def changed(self) -> OutsideChange | None:
        """The first value that has changed."""
        for place in self._places:
            now = place.read()
            if now is not place.value and not _equal(now, place.value):
                return OutsideChange(place.name, _shown(place.value), _shown(now))
            if place.version is not None and now._version != place.version:
                return OutsideChange(place.name, "a tensor", "the same tensor with other values")
            if place.copy is not None and not _equal(now, place.copy):
                return OutsideChange(place.name, _shown(place.copy), _shown(now))
        return None

    def tensors(self) -> list[Tensor]:
        """Those among the values."""
        return [each.value for each in self._places if isinstance(each.value, Tensor)]

    def check_read(self) -> None:
        """Raise `CaptureError` if running the loss has changed what it reads."""
        change = self.changed()
        if change:
            raise ChangedWhileReadError(
                f"The loss reads {change.name} and changes it: it was {change.before}, and {change.after} after another batch. A program would keep what it is "
                f"now. Make it a buffer of the model that is updated with torch, or put it into the batch. {WAY_OUT}"
            )

    def check_step(self) -> None:
        """Raise `TrainingError` if what it reads has changed since."""
        change = self.changed()
        if change:
            raise TrainingError(
                f"The loss reads {change.name}, which was {change.before} when the loss was captured and is {change.after} now. A program keeps what it was, so the "
                f"step was not made. Put the value into the batch (in collate), where it may change. {WAY_OUT}"
            )

    def _walk_model(self, model: nn.Module, opaque: Collection[str]) -> None:
        run_as_they_are = {id(each) for path in opaque for each in submodule(model, path).modules()}
        for path, module in model.named_modules():
            if id(module) in run_as_they_are:
                continue
            code = code_of_forward(module)
            if code is None:
                continue
            self._paths[id(module)] = path
            if is_users(code.co_filename):
                self._walk(type(module).forward, type(module).__name__, None, reads_of(code), 0, own=module)
            else:
                self._note_attributes(module, reads_of(code))

    def _note_attributes(self, module: nn.Module, reads: Reads) -> None:
        path, attributes = self._paths.get(id(module), type(module).__name__), vars(module)
        for name in reads.attributes:
            if name != "training" and name in attributes and _is_plain(attributes[name]):
                named = f"{path}.{name}" if path else name
                self._note(attributes[name], named, partial(attributes.get, name))

    def _walk(
        self, value: Any, name: str, read: Callable[[], Any] | None, reads: Reads, depth: int, own: Any = None
    ) -> None:
        """value: found at `name` by `read` (None: it cannot be replaced), in code that `reads`. own: the
        object of a method."""
        if _is_plain(value) or isinstance(value, Tensor | numpy.ndarray):
            if read is not None or not _is_plain(value):
                self._note(value, name, read or (lambda: value))
            return
        if depth > DEPTH or (id(value), id(own), reads.attributes) in self._seen:
            return
        self._seen[id(value), id(own), reads.attributes] = value, own
        before = len(self._places)
        if isinstance(value, FunctionType):
            self._walk_function(value, depth, own)
        elif isinstance(value, MethodType):
            self._walk(value.__func__, name, None, reads, depth + 1, own=value.__self__)
        elif isinstance(value, partial):
            for part in (value.func, value.args, value.keywords):
                self._walk(part, name, None, reads, depth + 1)
        elif isinstance(value, nn.Module):
            for key, tensor in (*value.named_parameters(), *value.named_buffers()):
                self._note(tensor, f"{name}.{key}", lambda tensor=tensor: tensor)
        elif isinstance(value, Mapping):
            named = [key for key in value if key in reads.constants or key in reads.stored]
            for key in [each for each in named if each in reads.constants] if named else list(value)[:MOST]:
                self._walk(value[key], f"{name}[{key!r}]", partial(_entry, value, key), reads, depth + 1)
        elif isinstance(value, list | tuple | set | frozenset):
            for number, each in enumerate(list(value)[:MOST]):
                entry = partial(_entry, value, number) if isinstance(value, list) else None
                self._walk(each, f"{name}[{number}]", entry, reads, depth + 1)
        elif isinstance(value, ModuleType):
            if is_users(getattr(value, "__file__", None) or ""):
                self._walk_attributes(vars(value), value, name, reads, depth)
        elif hasattr(value, "__dict__") and not isinstance(value, type(len)):
            self._walk_object(value, name, reads, depth)
        found_any = len(self._places) > before
        if found_any and read is not None and not isinstance(value, FunctionType | MethodType):
            # another one in its place has other attributes
            self._places.append(_Place(name, read, value, None, None))

    def _walk_function(self, function: FunctionType, depth: int, own: Any) -> None:
        code = function.__code__
        if not is_users(code.co_filename):
            return
        reads = reads_of(code)
        known = function.__globals__
        for name in reads.names:
            if name in known:
                _check_no_iterator(name, known[name], reads)
                where = f"{name} (a global of {code.co_filename})"
                self._walk(known[name], where, partial(known.get, name), reads, depth + 1)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            try:
                found = cell.cell_contents
            except ValueError:  # empty
                continue
            _check_no_iterator(name, found, reads)
            if name in reads.cells:
                self._walk(found, name, partial(getattr, cell, "cell_contents"), reads, depth + 1)
        for each in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._walk(each, f"a default of {function.__qualname__}", None, reads, depth + 1)
        if own is not None and not isinstance(own, nn.Module):
            self._walk_object(own, function.__qualname__.rpartition(".")[0] or "self", reads, depth + 1)
        elif own is not None:
            self._note_attributes(own, reads)
            self._walk_methods(own, reads, depth)

    def _walk_object(self, value: Any, name: str, reads: Reads, depth: int) -> None:
        kind = value if isinstance(value, type) else type(value)
        if not _is_users_class(kind):
            return
        self._walk_attributes(vars(value), value, name, reads, depth)
        if not isinstance(value, type):
            for attribute in reads.attributes:
                found = getattr(kind, attribute, None) if attribute not in vars(value) else None
                if found is not None and _is_plain(found):
                    self._note(found, f"{name}.{attribute}", partial(getattr, value, attribute, None))
            self._walk_methods(value, reads, depth)

    def _walk_attributes(
        self, attributes: Mapping[str, Any], owner: Any, name: str, reads: Reads, depth: int
    ) -> None:
        for attribute in reads.attributes:
            if attribute in attributes:
                read = partial(getattr, owner, attribute, None)
                self._walk(attributes[attribute], f"{name}.{attribute}", read, reads, depth + 1)

    def _walk_methods(self, value: Any, reads: Reads, depth: int) -> None:
        for attribute in (*reads.attributes, "__call__"):
            found = inspect.getattr_static(type(value), attribute, None)
            found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
            if isinstance(found, FunctionType) and is_users(found.__code__.co_filename):
                self._walk(found, attribute, None, reads, depth + 1, own=value)

    def _note(self, value: Any, name: str, read: Callable[[], Any]) -> None:
        version = value._version if isinstance(value, Tensor) and not value.is_inference() else None
        copy = None
        if isinstance(value, numpy.ndarray) and value.size <= 4096 and not value.dtype.hasobject:
            copy = value.copy()
        self._places.append(_Place(name, read, value, version, copy))


@dataclass(frozen=True)
class _Place:
    """value: at the capture. version: of a tensor. copy: of an array."""

    name: str
    read: Callable[[], Any]
    value: Any
    version: int | None
    copy: Any


@dataclass(frozen=True)
class Reads:
    """What a piece of code loads, including the functions defined in it.

    names: globals. cells: closure variables. constants: texts in it. stored: texts that only key stores.
    """

    names: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    constants: frozenset[str] = frozenset()
    stored: frozenset[str] = frozenset()


_NOTHING = Reads()
_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, numpy.generic)


@lru_cache(maxsize=1024)
def reads_of(code: CodeType) -> Reads:
    names: dict[str, None] = {}
    cells: dict[str, None] = {}
    attributes: dict[str, None] = {}
    constants: set[str] = set()
    stored: set[str] = set()
    instructions = list(dis.get_instructions(code))
    for each, following in zip(instructions, [*instructions[1:], None], strict=True):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names[each.argval] = None
        elif each.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_CLOSURE"):
            cells[each.argval] = None
        elif each.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            attributes[each.argval] = None
        elif each.opname == "LOAD_CONST" and isinstance(each.argval, str):
            is_stored = following is not None and following.opname == "STORE_SUBSCR"
            (stored if is_stored else constants).add(each.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = reads_of(constant)
            names |= dict.fromkeys(inner.names)
            cells |= dict.fromkeys(inner.cells)
            attributes |= dict.fromkeys(inner.attributes)
            constants |= inner.constants
            stored |= inner.stored
    return Reads(tuple(names), tuple(cells), tuple(attributes), frozenset(constants), frozenset(stored))


def _check_no_iterator(name: str, found: Any, reads: Reads) -> None:
    if "next" in reads.names and isinstance(found, Iterator):
        raise ChangedWhileReadError(
            f"The loss takes what comes next from {name}, a {type(found).__name__}; a program would keep what it took when it was read. "
            f"Put it into the batch (in collate). {WAY_OUT}"
        )


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, _PLAIN)


def _is_users_class(kind: type) -> bool:
    methods = [each for each in vars(kind).values() if isinstance(each, FunctionType)]
    code = next((each.__code__ for each in methods if not each.__code__.co_filename.startswith("<")), None)
    if code is not None:
        return is_users(code.co_filename)
    module = inspect.getmodule(kind)
    # SimpleNamespace holds what the user put into it
    return kind.__module__ == "types" or is_users(getattr(module, "__file__", None) or "")


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor) or type(one) is not type(other):
        return False
    if isinstance(one, numpy.ndarray):
        return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if not _is_plain(one):
        return False
    return bool(one == other) or (one != one and other != other)


def _shown(value: Any) -> str:
    if _is_plain(value):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:60]}..."
    article = "a" if isinstance(value, Tensor | numpy.ndarray) else "another"
    return f"{article} {type(value).__name__}"


def _entry(container: Any, key: Any) -> Any:
    try:
        return container[key]
    except (KeyError, IndexError):
        return None
