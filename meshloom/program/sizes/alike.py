"""Values that are equal except for integers, such as programs for batches of different sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from meshloom.core.errors import CaptureError
from meshloom.program.ir.sparse_constants import strides_of
from meshloom.program.trace.frozen import equal_bits

Number = Callable[[tuple[int, ...]], int]


class UnlikeError(CaptureError):
    """Values differ in more than integers, or an integer is no expression of the sizes of a batch."""


def alike(one: Any, other: Any) -> bool:
    """Return whether two values are equal except for integers. A bool is no integer.

    >>> alike({"view": (4, 32)}, {"view": (3, 47)}), alike((4, 32), (4, 32, 1)), alike((1,), (True,))
    (True, False, False)
    """
    try:
        merged((one, other), lambda numbers: numbers[0])
    except UnlikeError:
        return False
    return True


def merged(values: Sequence[Any], number: Number) -> Any:
    """Return the first of these values with `number` of the integers that all have at a place in each place.
    Raises `UnlikeError` where they differ in more than integers, and what `number` raises.

    >>> merged([("view", [4, 32]), ("view", [4, 47])], max)
    ('view', [4, 47])
    """
    first = values[0]
    kind = type(first)
    if any(type(each) is not kind for each in values):
        raise UnlikeError(f"{first} and {values[1]}")
    if kind is int:
        return number(tuple(values))
    if kind not in (str, bool, float) and all(each is first for each in values):
        return first
    if kind in (tuple, list):
        if len({len(each) for each in values}) > 1:
            raise UnlikeError(f"{len(first)} parts and {len(values[1])}")
        parts = [merged(each, number) for each in zip(*values, strict=True)]
        return first if _is_same(parts, first) else kind(parts)
    if isinstance(first, Mapping):
        if any(list(each) != list(first) for each in values):
            raise UnlikeError(f"{list(first)[:3]} and others")
        parts = [merged([each[key] for each in values], number) for key in first]
        return first if _is_same(parts, first.values()) else dict(zip(first, parts, strict=True))
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [each.name for each in dataclasses.fields(first) if each.compare]
        parts = [merged([getattr(each, name) for each in values], number) for name in names]
        same = _is_same(parts, (getattr(first, name) for name in names))
        return first if same else _record(first, dict(zip(names, parts, strict=True)))
    if isinstance(first, Tensor):
        if not all(_same_tensor(first, each) for each in values):
            raise UnlikeError("constants")
    elif any(each != first for each in values):
        raise UnlikeError(f"{first} and {values[1]}")
    return first


def _is_same(parts: Iterable[Any], those: Iterable[Any]) -> bool:
    return all(part is each for part, each in zip(parts, those, strict=True))


def _record(like: Any, parts: Mapping[str, Any]) -> Any:
    """A dataclass with these parts. Fields that it does not compare (compiled code, say) are reset."""
    record: Any = object.__new__(type(like))
    for each in dataclasses.fields(like):
        if not each.compare:
            make = each.default_factory
            record.__dict__[each.name] = each.default if make is dataclasses.MISSING else make()
    record.__dict__.update(parts)
    return record


def _same_tensor(one: Tensor, other: Tensor) -> bool:
    """Whether they have one layout and equal bits. Those of programs by shapes have none."""
    facts = ((each.dtype, each.shape, strides_of(each)) for each in (one, other))
    return len(set(facts)) == 1 and (one.is_meta or equal_bits(one, other))
