"""Fits values that differ only in integers as functions of the sizes of a batch, and evaluates them at any.

    sizes    (4, 32)      (4, 40)      (3, 47)
    program  view(x, [128, 7])  ...  view(x, [160, 7])  ...  view(x, [141, 7])        view(x, [s0 * s1, 7])

Every integer that differs must be one of the expressions that occur in the loss. In sharded programs it may
be a part of one, or a linear function of one.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations_with_replacement
from typing import Any, Generic, TypeVar

from torch import Tensor

from meshloom.program.ir.sparse_constants import strides_of
from meshloom.program.sizes.symbolic import (
    Dim,
    Expression,
    Sizes,
    Trace,
    dims_by_sizes,
    holds,
    parts_of,
    value_of,
)
from meshloom.program.trace.frozen import equal_bits

T = TypeVar("T")
MAX_FACTORS = 24  # expressions of which products are tried


class UnlikeError(Exception):
    """Values differ in more than integers, or an integer is no expression of the sizes, or no integer."""


@dataclass(frozen=True)
class _Number:
    """(start + step * source) / below, where `source` is the index of an expression."""

    source: int
    start: int
    step: int
    below: int


@dataclass(frozen=True)
class _Changed:
    """A value equal to `like` except at some places. rebuild: from `like` and the new parts."""

    like: Any
    parts: tuple[tuple[Any, Any], ...]
    rebuild: Callable[[Any, list[tuple[Any, Any]]], Any]


@dataclass(frozen=True, kw_only=True)
class Form(Generic[T]):
    """A value for batches whose sizes meet `conditions`. sources: expressions from which integers come."""

    conditions: tuple[Expression, ...]
    sources: tuple[Expression, ...]
    root: Any

    def covers(self, sizes: Sizes) -> bool:
        """Whether the form applies to these sizes."""
        return all(holds(each, sizes) for each in self.conditions)

    def at(self, sizes: Sizes) -> T:
        """The value for these sizes. Raises `UnlikeError` where an integer would not be one."""
        try:
            return _evaluated(self.root, [value_of(each, sizes) for each in self.sources], {})
        except ZeroDivisionError as error:
            raise UnlikeError(str(error)) from error


def fitted(samples: Sequence[tuple[Sizes, T]], trace: Trace, *, num_parts: int = 1) -> Form[T]:
    """The form of a value known at three sizes or more. trace: of its loss. Raises `UnlikeError`.

    num_parts: number of parts into which a dim may be sharded. Then expressions besides those of the loss are
    tried, so that the form is a guess to be checked at another size.
    """
    points = [sizes for sizes, _ in samples]
    conditions = _conditions(points, trace)
    fitting = _Fitting(points, trace, conditions, num_parts)
    root = _walk([value for _, value in samples], fitting.number)
    return Form(conditions=conditions, sources=tuple(fitting.sources), root=_interned(root, {}))


def alike(one: Any, other: Any) -> bool:
    """Whether two values are equal except for integers. A bool is no integer.

    >>> alike({"view": (4, 32)}, {"view": (3, 47)}), alike((4, 32), (4, 32, 1)), alike((1,), (True,))
    (True, False, False)
    """
    return _compared(one, other, lambda numbers: numbers[0])


def equal(one: Any, other: Any) -> bool:
    """Whether two values are equal, including integers."""

    def check(numbers: Sequence[int]) -> int:
        if len(set(numbers)) > 1:
            raise UnlikeError
        return numbers[0]

    return _compared(one, other, check)


def same_but_for(one: Any, other: Any, pairs: Collection[tuple[Any, ...]]) -> bool:
    """Whether two values are equal except for integers, each pair of which is one of `pairs`.

    >>> same_but_for((4, 32), (4, 48), {(32, 48)}), same_but_for((4, 32), (4, 40), {(32, 48)})
    (True, False)
    """

    def check(numbers: Sequence[int]) -> int:
        if numbers[0] != numbers[1] and tuple(numbers) not in pairs:
            raise UnlikeError
        return numbers[0]

    return _compared(one, other, check)


def _compared(one: Any, other: Any, number: Callable[[Sequence[int]], int]) -> bool:
    try:
        _walk([one, other], number)
    except UnlikeError:
        return False
    return True


def _conditions(points: Sequence[Sizes], trace: Trace) -> tuple[Expression, ...]:
    """The guards; what is equal at all points stays equal; and min and max keep choosing the same operand."""
    dims: list[Expression] = [["size", *dim] for dim in points[0]]
    found: list[Expression] = list(trace.guards)
    parts = [part for expression in (*trace.expressions, *dims) for part in parts_of(expression)]
    for each in _distinct([part for part in parts if isinstance(part, list)]):
        values = _values(each, points)
        if len(set(values)) == 1:
            found.append(["eq", each, values[0]])
        elif each[0] in ("min", "max"):
            chosen = [operand for operand in each[1:] if _values(operand, points) == values]
            if chosen:
                found.append(["eq", each, chosen[0]])
        elif each[0] == "size":
            found.append(["gt", each, 1])
    for dims_together in dims_by_sizes(
        points
    ).values():  # indistinguishable for integers that follow one of them
        first, *others = dims_together
        found += [["eq", ["size", *first], ["size", *other]] for other in others]
    return tuple(found)


def _probes(points: Sequence[Sizes], conditions: Sequence[Expression]) -> list[Sizes]:
    """New sizes under the conditions: sums of multiples of differences keep divisors and relations of dims."""
    draw = random.Random(0)
    first, found = points[0], list[Sizes]()
    for number in range(200):
        multiples = [draw.randrange(-6, 20) for _ in points]
        trial: dict[Dim, int] = {}
        for dims in dims_by_sizes(points).values():
            if number % 2:  # dims independently
                multiples = [draw.randrange(-6, 20) for _ in points]
            moved = (
                multiple * (point[dims[0]] - first[dims[0]])
                for multiple, point in zip(multiples, points, strict=True)
            )
            trial.update(dict.fromkeys(dims, first[dims[0]] + sum(moved)))
        if min(trial.values(), default=0) > 0 and all(holds(each, trial) for each in conditions):
            found.append(trial)
    return found[:8]


class _Fitting:
    """Finds the expressions of integers. sources: those found."""

    def __init__(
        self, points: Sequence[Sizes], trace: Trace, conditions: Sequence[Expression], num_parts: int
    ) -> None:
        self._points = points
        self._seen = _distinct([*trace.expressions, *(["size", *dim] for dim in points[0])])
        self._guesses = _guesses(self._seen, num_parts) if num_parts > 1 else ([], [])
        self._probes = _probes(points, conditions)
        self._by_values: dict[tuple[int, ...], list[Expression]] = {}
        for each in self._seen:
            self._by_values.setdefault(_values(each, points), []).append(each)
        self._known: dict[tuple[int, ...], _Number] = {}
        self.sources: list[Expression] = []

    def number(self, numbers: Sequence[int]) -> Any:
        """The form of an integer, from its values at the points."""
        key = tuple(numbers)
        if len(set(key)) == 1:
            return key[0]
        if key not in self._known:
            expression, start, step = self._exactly(key) or self._guessed(key)
            below = start.denominator * step.denominator
            if expression not in self.sources:
                self.sources.append(expression)
            self._known[key] = _Number(
                self.sources.index(expression), int(start * below), int(step * below), below
            )
        return self._known[key]

    def _exactly(self, key: tuple[int, ...]) -> tuple[Expression, Fraction, Fraction] | None:
        """The expression with these values, if it is unique."""
        found = self._by_values.get(key, [])
        if len(found) > 1 and (not self._probes or len({_values(each, self._probes) for each in found}) > 1):
            raise UnlikeError(f"{list(key)} match {len(found)} expressions of sizes")
        return (found[0], Fraction(0), Fraction(1)) if found else None

    def _guessed(self, key: tuple[int, ...]) -> tuple[Expression, Fraction, Fraction]:
        singles, products = self._guesses
        for expression in (*singles, *products):
            values = _values(expression, self._points)
            if None in values:
                continue
            at = next((place for place, value in enumerate(values) if value != values[0]), None)
            if at is None:
                continue
            step = Fraction(key[at] - key[0], values[at] - values[0])
            start: Any = key[0] - step * values[0]
            fits = all(start + step * value == wanted for value, wanted in zip(values, key, strict=True))
            if step and fits and (start == 0 or expression in singles):
                return expression, Fraction(start), step
        raise UnlikeError(f"{list(key)} match no expression of sizes")


def _guesses(seen: Sequence[Expression], num_parts: int) -> tuple[list[Expression], list[Expression]]:
    """Candidates for a shard's sizes: sizes, their smallest and largest shards, and products of two."""
    singles: list[Expression] = []
    for each in seen:
        rounded_up = ["floordiv", ["add", each, num_parts - 1], num_parts]
        singles += [each, ["floordiv", each, num_parts], rounded_up]
    factors = [each for each in singles if _depth(each) <= 3][:MAX_FACTORS]
    return singles, [["mul", one, other] for one, other in combinations_with_replacement(factors, 2)]


def _distinct(expressions: Sequence[Expression]) -> list[Expression]:
    return list({repr(each): each for each in expressions}.values())


def _values(expression: Expression, points: Sequence[Sizes]) -> tuple[Any, ...]:
    """Values at the points; None for a division by zero."""
    found: list[Any] = []
    for each in points:
        try:
            found.append(value_of(expression, each))
        except ZeroDivisionError:
            found.append(None)
    return tuple(found)


def _depth(expression: Expression) -> int:
    if not isinstance(expression, list) or expression[0] == "size":
        return 0
    return 1 + max(map(_depth, expression[1:]), default=0)


def _walk(values: Sequence[Any], number: Callable[[Sequence[int]], Any]) -> Any:
    """The first of these values, with integers replaced by `number` of the integers at the same place, and
    containers of replaced integers by `_Changed`."""
    first = values[0]
    kind: type[Any] = type(first)
    if any(type(each) is not kind for each in values):
        raise UnlikeError(f"{first} and {values[1]}")
    if kind is int:
        return number(values)
    if kind not in (str, bool, float) and all(each is first for each in values):
        return first
    if kind in (str, bool, float):
        if any(each != first for each in values):
            raise UnlikeError(f"{first} and {values[1]}")
        return first
    if kind in (tuple, list):
        if len({len(each) for each in values}) > 1:
            raise UnlikeError(f"{len(first)} parts and {len(values[1])}")
        places = [(at, list(parts)) for at, parts in enumerate(zip(*values, strict=True))]
        return _changed(first, places, _sequence, number)
    if isinstance(first, Mapping):
        keys: list[Any] = list(first)
        if any(list(each) != keys for each in values):
            raise UnlikeError(f"{keys[:3]} and others")
        return _changed(first, [(key, [each[key] for each in values]) for key in keys], _mapping, number)
    if isinstance(first, Tensor):
        if not all(_same_tensor(first, each) for each in values):
            raise UnlikeError("constants")
        return first
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [each.name for each in dataclasses.fields(first) if each.compare]
        fields = [(name, [getattr(each, name) for each in values]) for name in names]
        return _changed(first, fields, _record, number)
    if any(each != first for each in values):
        raise UnlikeError(f"{first} and {values[1]}")
    return first


def _changed(first: Any, places: list[tuple[Any, list[Any]]], rebuild: Any, number: Any) -> Any:
    walked = [(place, _walk(values, number)) for place, values in places]
    parts = tuple((place, part) for place, part in walked if isinstance(part, _Number | _Changed))
    return _Changed(first, parts, rebuild) if parts else first


def _interned(part: Any, known: dict[Any, Any]) -> Any:
    """The form with equal shapes shared, so that each is evaluated once."""
    if not isinstance(part, _Changed):
        return part
    parts = tuple((place, _interned(each, known)) for place, each in part.parts)
    inner = dataclasses.replace(part, parts=parts)
    is_shape = isinstance(inner.like, tuple) and all(type(each) is int for each in inner.like)
    return known.setdefault((inner.like, inner.parts), inner) if is_shape else inner


def _evaluated(part: Any, values: Sequence[int], known: dict[int, Any]) -> Any:
    """A part at these values of its sources. known: parts already evaluated."""
    if isinstance(part, _Number):
        above = part.start + part.step * values[part.source]
        if above % part.below:
            raise UnlikeError(f"{above} / {part.below}")
        return above // part.below
    if not isinstance(part, _Changed):
        return part
    if id(part) not in known:
        parts = [(place, _evaluated(each, values, known)) for place, each in part.parts]
        known[id(part)] = part.rebuild(part.like, parts)
    return known[id(part)]


def _sequence(like: Any, parts: list[tuple[int, Any]]) -> Any:
    values = list(like)
    for place, value in parts:
        values[place] = value
    return tuple(values) if isinstance(like, tuple) else values


def _mapping(like: Any, parts: list[tuple[Any, Any]]) -> Any:
    return {**like, **dict(parts)}


def _record(like: Any, parts: list[tuple[str, Any]]) -> Any:
    """A dataclass. Fields that it does not compare (compiled code, say) belong to one size, and are reset."""
    record: Any = object.__new__(type(like))
    for each in dataclasses.fields(like):
        if each.compare:
            record.__dict__[each.name] = getattr(like, each.name)
        elif each.default_factory is not dataclasses.MISSING:
            record.__dict__[each.name] = each.default_factory()
        else:
            record.__dict__[each.name] = each.default
    record.__dict__.update(parts)
    return record


def _same_tensor(one: Tensor, other: Tensor) -> bool:
    """Whether they have one layout and equal bits. Those of programs by shapes have none."""
    facts = ((each.dtype, each.shape, strides_of(each)) for each in (one, other))
    return len(set(facts)) == 1 and (one.is_meta or equal_bits(one, other))
