"""Guards what captured code reads besides the model's tensors and the batch: a program keeps such a value as it was.

    def loss(model, batch):
        return criterion(model(batch["x"] * data.scale), batch["y"]) * WEIGHTS["main"]

reads `data.scale` and `WEIGHTS["main"]`. They are found in the code of the loss, of the model's modules and of the
user's functions that these name, leaves excepted. What a run of it changes (`self.calls += 1`) is refused before the first
step, what changes later before the step that would use it. Only loads count: the loss may write `history["loss"] = ...`.
"""

from __future__ import annotations

import datetime
import inspect
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from meshloom.core.errors import CaptureError
from meshloom.core.job import LossFunction
from meshloom.core.modules.class_code import Reads, reads_of
from meshloom.core.modules.named_leaves import is_function
from meshloom.core.modules.packages import is_users
from meshloom.program.capture.guarded_values import (
    MISSING,
    MOST,
    SEQUENCES,
    At,
    GuardedValue,
    ReadPlace,
    facts_of,
    is_plain_value,
)
from meshloom.program.ir.lines import WAY_OUT, SourceLine, describe_line
from meshloom.program.ir.nodes import submodule
from meshloom.program.trace.attributes import TORCHS_OWN

DEPTH = 8
_FUNCTIONS = FunctionType | MethodType | classmethod | staticmethod
_NOTHING, _NOW = Reads(), time.time
_READING = Reads(
    attributes=dict.fromkeys(("__getitem__", "__getitems__", "__iter__", "__next__"), ("", 0, ""))
)


class ChangedWhileReadError(CaptureError):
    """A loss changes what it reads: no program, and no part that runs as written, would do that as one device does."""


class Guards:
    """The values that `function` and the forwards of `model` read. leaves: modules that run as written."""

    def __init__(
        self, function: Callable[..., Any], model: nn.Module | None = None, leaves: Collection[str] = ()
    ) -> None:
        self._function = function
        self._places: dict[tuple[int, Any], GuardedValue] = {}
        self._refused: list[str] = []  # code that no program follows
        self._of_others = Reads()  # attributes that code reads of another object than its own
        self._stored = Reads()  # what code sets, and what is near
        # by identity; what is in it stays alive, so that no identity is used again
        self._seen: dict[Any, Any] = {}
        self._met: dict[int, Any] = {}  # objects whose code was looked at, and what this names
        parts = (*model.modules(), *model.parameters(), *model.buffers()) if model is not None else ()
        self._models_own = {id(each) for each in parts}
        self._walk(function, ReadPlace("the loss"), _NOTHING, 0)
        if model is not None:
            self._walk_model(model, leaves)
        self._seen.clear()

    def check_code(self) -> None:
        """Raise `CaptureError` for code that no program follows: clocks, and iterators that it moves on."""
        for sentence in self._refused:
            raise ChangedWhileReadError(sentence)

    @contextmanager
    def following(self) -> Iterator[LossFunction]:
        """The function, whose runs raise `CaptureError` if they change what is read. What they set up is put back afterwards: the first
        may replace None (a cache), in a package's code any value; and each may leave a tensor where a plain value was.
        """
        seen = dict(self._places)

        def followed(model: nn.Module, batch: Any) -> Any:
            returned = self._function(model, batch)
            for place, before in seen.items():
                now, first = before.now(), self._places[place]
                if before.equals(now):
                    continue
                may_set_up = before is first and (before.facts == "None" or not before.is_own)
                if not first.is_plain or (before.is_plain and now.is_plain and not may_set_up):
                    raise ChangedWhileReadError(self._of_run(before, now))
                seen[place] = now
            return returned

        try:
            yield followed
        finally:
            for place in self._places.values():
                place.at.put_back(place.value)

    def check_reading(self, dataset: Any, collate: Callable[..., Any] | None) -> None:
        """Raise `CaptureError` if a value has changed while batches were read, or is set by the code that reads them."""
        data = Guards(collate or len)
        data._walk(dataset, ReadPlace("the data"), _READING, 0)
        for place in self._places.values():
            now = place.now()
            line = place.line_in(data._stored.stored) if id(place.at.owner) in data._met else None
            if line or not place.equals(now):
                by = f"{describe_line(line)} sets" if line else "changes"
                values = f": it was {place.shown()} after the first batch, and {now.shown(place)} two batches later"
                raise ChangedWhileReadError(
                    f"The loss reads {place.where}, which {by} as data is read{'' if place.equals(now) else values}. A program would keep what it was. "
                    f"Return it with the samples, or add it to the batch (in collate). {WAY_OUT}"
                )

    @property
    def values(self) -> list[GuardedValue]:
        """For `check_step`."""
        return list(self._places.values())

    def tensors(self) -> list[Tensor]:
        """Those among the values."""
        return [each.value for each in self._places.values() if isinstance(each.value, Tensor)]

    def _of_run(self, before: GuardedValue, now: GuardedValue) -> str:
        line = before.line_in({**self._stored.near, **self._stored.stored})
        by = f"{describe_line(line)} sets it" if line and line != before.line else "changes it"
        return (
            f"The loss reads {before.where}, and {by}: it was {before.shown()}, and is {now.shown(before)} after a batch. A program would keep what it was. "
            "Make it a buffer that is updated with torch (Job(buffers={...}) says how chunks join it), or None at first if it is a cache; use meshloom.step() "
            f"for the number of the step, put it into the batch (in collate), or name the module that does this in Job(leaves=[...]). {WAY_OUT}"
        )

    def _walk_model(self, model: nn.Module, leaves: Collection[str]) -> None:
        paths = [path for path in leaves if not is_function(path)]
        within = {id(each) for path in paths for each in submodule(model, path).modules()}
        for path, module in model.named_modules():
            if id(module) in within:
                continue
            for hook in (
                *vars(module)["_forward_hooks"].values(),
                *vars(module)["_forward_pre_hooks"].values(),
            ):
                self._walk(hook, ReadPlace(path), _NOTHING, 0)
            forward = getattr(type(module), "forward", None)  # a scripted one has none
            if not isinstance(forward, FunctionType):
                continue
            # but for functions that are leaves
            inner = inspect.unwrap(forward, stop=lambda each: not isinstance(each, FunctionType))
            if isinstance(inner, FunctionType) and is_users(inner.__code__.co_filename):
                self._walk(forward, ReadPlace(path), _NOTHING, 0, own=module)
            elif isinstance(inner, FunctionType):
                self._walk_attributes(module, ReadPlace(path), reads_of(inner.__code__), 0, is_own=False)
        num_known = -1
        # methods that are called from outside read further ones
        while len(self._of_others.attributes) > num_known:
            num_known = len(self._of_others.attributes)
            reads = Reads(attributes=dict(self._of_others.attributes))
            for path, module in model.named_modules():
                is_own = _is_users_class(type(module))
                self._walk_attributes(module, ReadPlace(path), reads, 0, is_own=is_own)
                if is_own and id(module) not in within:
                    self._walk_methods(module, ReadPlace(path), reads, 0)

    def _walk(
        self,
        value: Any,
        source: ReadPlace,
        reads: Reads,
        depth: int,
        *,
        at: At | None = None,
        own: Any = None,
        is_own: bool = True,
    ) -> None:
        """value: found by code that `reads`. at: where; None: it cannot be replaced. own: the object of a method. is_own: as of `GuardedValue`."""
        if id(value) in self._models_own:  # as of a hook that refers to its module
            return
        self._check_clock(value, (), source)
        self._met[id(value)] = value
        named = [key for key in value if key in reads.constants] if isinstance(value, Mapping) else []
        if facts_of(value) is not None and not named:
            if at or not is_plain_value(value):
                self._note(value, source, at or At([value], 0, is_entry=True), is_own=is_own)
            return
        if depth > DEPTH or (id(value), id(own), id(reads)) in self._seen:
            return
        self._seen[id(value), id(own), id(reads)] = value, own, reads
        before = len(self._places)
        if isinstance(value, FunctionType):
            self._walk_function(value, source, depth, own)
            self._walk(vars(value).get("__wrapped__"), source, reads, depth + 1, own=own)
        elif isinstance(value, _FUNCTIONS):
            function: Any = value
            self._walk(function.__func__, source, reads, depth + 1, own=getattr(value, "__self__", own))
        elif isinstance(value, partial):
            for part in (value.func, value.args, value.keywords):
                self._walk(part, source, reads, depth + 1)
        elif isinstance(value, nn.Module):
            for key, tensor in (*value.named_parameters(), *value.named_buffers()):
                self._note(tensor, source.attribute(key), At([tensor], 0, is_entry=True))
        elif isinstance(value, Mapping):
            for key in named or list(value)[:MOST]:
                self._walk(
                    value[key], source.entry(key, reads), reads, depth + 1, at=At(value, key, is_entry=True)
                )
        elif isinstance(value, SEQUENCES):
            for number, each in enumerate(list(value)[:MOST]):
                there = At(value, number, is_entry=True) if isinstance(value, list) else None
                self._walk(each, source.entry(number, reads), reads, depth + 1, at=there)
        elif _is_users(value):
            self._walk_attributes(value, source, reads, depth)
            self._walk_methods(value, source, reads, depth)
        if at and len(self._places) > before and not isinstance(value, _FUNCTIONS):
            self._note(value, source, at, facts=None)  # another one in its place has other attributes

    def _walk_function(self, function: FunctionType, source: ReadPlace, depth: int, own: Any) -> None:
        if not is_users(function.__code__.co_filename):
            return
        reads = reads_of(function.__code__)
        self._of_others.attributes.update(reads.of_others)
        self._stored.stored.update(reads.stored)
        self._stored.near.update(reads.near)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
        found = {name: At(function.__globals__, name, is_entry=True) for name in reads.names}
        found |= {name: At(cells[name], "cell_contents") for name in reads.cells if name in cells}
        self._met |= {id(each): each for each in (own, *(at.owner for at in found.values()))}
        for name, at in found.items():
            value = at.read()
            if value is MISSING or _is_only_filled(value, name, reads):
                continue
            there = ReadPlace("").attribute(name, {**reads.names, **reads.cells}[name])
            if "next" in reads.names and isinstance(value, Iterator):
                self._refused.append(
                    f"The loss takes what comes next from {there.where}, a {type(value).__name__}; a program would keep what it took when it was captured. "
                    f"Put it into the batch (in collate). {WAY_OUT}"
                )
            self._walk(value, there, reads, depth + 1, at=at)
        for path, line in reads.paths.items():
            if path[0] in found:
                self._check_clock(
                    found[path[0]].read(), path[1:], ReadPlace(".".join(path), SourceLine(*line))
                )
        for each in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._walk(each, ReadPlace(f"a default of {function.__qualname__}"), reads, depth + 1)
        if own is not None:
            self._walk_attributes(own, source, reads, depth)
            self._walk_methods(own, source, reads, depth)

    def _walk_attributes(
        self, owner: Any, source: ReadPlace, reads: Reads, depth: int, *, is_own: bool = True
    ) -> None:
        """Those of an object that code reads; of a `nn.Module` neither tensors nor modules, nor containers of any."""
        by_text = {
            name: line for name, line in reads.constants.items() if name in reads.stored
        }  # getattr(self, "calls", 0)
        for name, line in {**reads.attributes, **by_text}.items():
            value = getattr(owner, "__dict__", {}).get(name, MISSING)
            if value is MISSING:  # a default, in a slot, or not there yet
                value = inspect.getattr_static(type(owner), name, MISSING)
                if isinstance(value, MemberDescriptorType):
                    value = getattr(owner, name, MISSING)
                if not is_plain_value(value) and not (name in reads.stored and not hasattr(owner, name)):
                    continue
            if isinstance(owner, nn.Module) and (
                name == "training"
                or name in TORCHS_OWN
                or isinstance(value, Tensor | nn.Module)
                or (isinstance(value, dict | SEQUENCES) and not is_plain_value(value))
            ):
                continue
            if not _is_only_filled(value, name, reads) and (is_own or is_plain_value(value)):
                self._walk(
                    value, source.attribute(name, line), reads, depth + 1, at=At(owner, name), is_own=is_own
                )

    def _walk_methods(self, value: Any, source: ReadPlace, reads: Reads, depth: int) -> None:
        for name in (*reads.attributes, "__call__"):
            for kind in type(value).__mro__:
                found = vars(kind).get(name)
                found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
                if isinstance(found, FunctionType):
                    self._walk(found, source, _NOTHING, depth + 1, own=value)

    def _check_clock(self, value: Any, path: tuple[str, ...], source: ReadPlace) -> None:
        """Refuse code that calls what the attributes of `path`, one of the other, lead to, if this reads a clock."""
        for name in path:
            owner, value = value, getattr(value, name, None) if isinstance(value, ModuleType | type) else None
            if isinstance(owner, type) and issubclass(owner, datetime.date):
                value = _NOW if name in ("now", "today", "utcnow") else None
        if (
            isinstance(value, BuiltinFunctionType)
            and value.__module__ == "time"
            and value.__name__ != "sleep"
        ):
            self._refused.append(
                f"The loss reads the clock: {source.where}. A program would keep the time at which it was captured. Leave it out, use meshloom.step() for what goes "
                "by the number of the step, put the time into the batch (in collate), or name the module that does this in Job(leaves=[...]). "
                f"{WAY_OUT}"
            )

    def _note(
        self, value: Any, source: ReadPlace, at: At, *, is_own: bool = True, facts: Any = MISSING
    ) -> None:
        facts = facts_of(value) if facts is MISSING else facts
        place = GuardedValue(**vars(source), at=at, is_own=is_own, value=value, facts=facts)
        self._places.setdefault((id(at.owner), at.key), place)


def _is_only_filled(value: Any, name: str, reads: Reads) -> bool:
    """Whether code only sets entries of a container."""
    return isinstance(value, dict | SEQUENCES) and name not in reads.whole


def _is_users(value: Any) -> bool:
    """Whether a module, a class or an object is of the user's code."""
    if isinstance(value, ModuleType):
        return bool(getattr(value, "__file__", None)) and is_users(str(value.__file__))
    return _is_users_class(value if isinstance(value, type) else type(value))


def _is_users_class(kind: type) -> bool:
    methods = [inspect.unwrap(each) for each in vars(kind).values() if isinstance(each, FunctionType)]
    code = next((each.__code__ for each in methods if not each.__code__.co_filename.startswith("<")), None)
    if code is not None:
        return is_users(code.co_filename)
    module = inspect.getmodule(kind)
    if kind.__module__ in ("builtins", "types"):
        return kind.__module__ == "types"  # SimpleNamespace holds what the user put into it
    return is_users(getattr(module, "__file__", None) or "")
