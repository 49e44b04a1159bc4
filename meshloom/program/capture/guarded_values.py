"""A value that captured code reads: where it is, what it was, and whether it is the same now."""

from __future__ import annotations

import enum
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from meshloom.core.errors import TrainingError
from meshloom.core.modules.class_code import Lines, Reads
from meshloom.program.ir.lines import WAY_OUT, SourceLine, describe_line

MOST = 1000  # values of a container that are compared, and entries that are looked at
MOST_OF_ARRAY = 4096  # elements
SEQUENCES = list | tuple | set | frozenset | deque
MISSING: Any = object()
_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, numpy.generic, torch.dtype, torch.device)


class At(NamedTuple):
    """An entry of a mapping or list, or an attribute."""

    owner: Any
    key: Any
    is_entry: bool = False

    def read(self) -> Any:
        """Its value; `MISSING` if it has none."""
        try:
            return self.owner[self.key] if self.is_entry else getattr(self.owner, self.key, MISSING)
        except (KeyError, IndexError, ValueError):  # the last of an empty cell
            return MISSING

    def put_back(self, value: Any) -> None:
        if self.read() is value:
            return
        if self.is_entry:
            self.owner[self.key] = value
        elif value is not MISSING:
            setattr(self.owner, self.key, value)
        elif self.key in vars(self.owner):
            delattr(self.owner, self.key)


@dataclass(frozen=True)
class ReadPlace:
    """Where a value is read. keys: the names of what it is, and of what it is in."""

    name: str
    line: SourceLine | None = None
    keys: tuple[str, ...] = ()

    def attribute(self, name: str, line: tuple[str, int, str] | None = None) -> ReadPlace:
        there = SourceLine(*line) if line else self.line
        return ReadPlace(f"{self.name}.{name}" if self.name else name, there, (name, *self.keys))

    def entry(self, key: Any, reads: Reads) -> ReadPlace:
        line = reads.constants.get(key) if isinstance(key, str) else None
        return ReadPlace(
            f"{self.name}[{key!r}]", SourceLine(*line) if line else self.line, (str(key), *self.keys)
        )

    @property
    def where(self) -> str:
        return f"{self.name} at {describe_line(self.line)}" if self.line else self.name


@dataclass(frozen=True, kw_only=True)
class GuardedValue(ReadPlace):
    """A value that is read. is_own: the user's code reads it. facts: as of `facts_of`; None: its identity alone counts."""

    at: At
    is_own: bool
    value: Any
    facts: Any

    @property
    def is_plain(self) -> bool:
        return isinstance(self.facts, str)

    @cached_property
    def _is_fixed(self) -> bool:
        """Whether the same object has the same value."""
        return self.facts is None or (self.is_plain and not isinstance(self.value, dict | SEQUENCES))

    def now(self) -> GuardedValue:
        """The same with its present value."""
        value = self.at.read()
        if value is self.value and self._is_fixed:
            return self
        return replace(self, value=value, facts=facts_of(value) if self.facts is not None else None)

    def line_in(self, stored: Lines) -> SourceLine | None:
        """The line that sets it, or an entry of what it is in."""
        return next((SourceLine(*stored[key]) for key in self.keys if key in stored), None)

    def equals(self, other: GuardedValue) -> bool:
        """Whether the same may be computed with this value."""
        by_facts = self.is_plain or isinstance(self.value, numpy.ndarray)
        return (by_facts or self.value is other.value) and self.facts == other.facts

    def shown(self, before: GuardedValue | None = None) -> str:
        if self.is_plain:
            return self.facts if len(self.facts) <= 60 else f"{self.facts[:60]}..."
        kind = type(self.value).__name__
        if before is None or type(before.value) is not type(self.value):
            return f"a {kind}"
        return f"the same {kind} with other contents" if before.value is self.value else f"another {kind}"


def check_step(values: Iterable[GuardedValue]) -> None:
    """Raise `TrainingError` if one has changed since the loss was captured."""
    for before in values:
        now = before.now()
        if now is not before and not before.equals(now):
            raise TrainingError(
                f"The loss reads {before.where}, which was {before.shown()} when the loss was captured and is {now.shown(before)} now. A program keeps what it "
                "was, so the step was not made. Use meshloom.step() for what goes by the number of the step; other values belong into the batch (in collate), "
                f"where they may change, or into a buffer of the model. {WAY_OUT}"
            )


def facts_of(value: Any) -> Any:
    """Equal for equal values: the text of plain ones, the state of tensors, arrays and generators; None: identity alone counts."""
    if value is MISSING or is_plain_value(value):
        return "None" if value is MISSING else repr(value)
    if isinstance(value, Tensor):
        return (None if value.is_inference() else value._version,)
    if isinstance(value, numpy.ndarray):
        is_small = value.size <= MOST_OF_ARRAY and not value.dtype.hasobject
        return (str(value.dtype), value.shape, value.tobytes() if is_small else id(value))
    if isinstance(value, random.Random):
        return (value.getstate(),)
    if isinstance(value, numpy.random.Generator | numpy.random.RandomState):
        state = value.bit_generator.state if isinstance(value, numpy.random.Generator) else value.get_state()
        return (repr(state),)
    return (value.get_state().numpy().tobytes(),) if isinstance(value, torch.Generator) else None


def is_plain_value(value: Any) -> bool:
    """Whether a value, and all in it, is a number, a text or the like."""
    waiting, count = [value], 0
    while waiting:
        each = waiting.pop()
        count += 1
        if isinstance(each, dict | SEQUENCES):
            if count + len(waiting) + len(each) > MOST:
                return False
            waiting += [*each, *each.values()] if isinstance(each, dict) else each
        elif each is not None and not isinstance(each, _PLAIN):
            return False
    return True
