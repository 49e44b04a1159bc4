"""Frozen dataclasses of numbers, text, tuples and mappings as JSON, and decoded by their type annotations:
floats are exact, and anything else is refused."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def plain(value: Any) -> Any:
    """A value for `json.dumps`: dataclasses as objects, tuples as lists, mappings as lists of pairs."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in _fields(type(value))}
    if isinstance(value, Mapping):
        return [[plain(key), plain(each)] for key, each in value.items()]
    return [plain(each) for each in value] if isinstance(value, tuple | list) else value


def typed(kind: Any, value: Any) -> Any:
    """The value of type `kind` that `plain` encoded as `value`; raises `ValueError` if it has another type.

    >>> typed(tuple[int, ...], plain((1, 2)))
    (1, 2)
    """
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        known = _fields(kind)
        if not isinstance(value, dict) or value.keys() != known.keys():
            raise ValueError(f"{value!r} is not a {kind.__name__}")
        return kind(**{name: typed(each, value[name]) for name, each in known.items()})
    if origin in (Union, types.UnionType):
        for each in inner:
            try:
                return typed(each, value)
            except ValueError:
                pass
        raise ValueError(f"{value!r} is none of {inner}")
    if origin is Literal:
        if value in inner:
            return value
    elif isinstance(value, list):
        if origin is tuple and inner[-1] is Ellipsis:
            return tuple(typed(inner[0], each) for each in value)
        if origin is tuple and len(inner) == len(value):
            return tuple(typed(each, found) for each, found in zip(inner, value, strict=True))
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return {typed(inner[0], key): typed(inner[1], each) for key, each in value}
    elif type(value) is kind or (value is None and kind is type(None)):
        return value
    raise ValueError(f"{value!r} is not a {kind}")


@cache
def _fields(kind: Any) -> dict[str, Any]:
    """Field -> its type."""
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}
