"""The settings of a plan as text: parsed, written, and checked for their type.

    dp=2,tp=2,overlap=false,tp_placements=blocks.*.up:column+head:vocabulary,cuts=blocks.4+blocks.8

Settings are joined by `,`, items of a list by `+`, and a pattern and its value by `:`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from meshloom.core.errors import PlanError
from meshloom.core.units import parse_bytes

Value = int | float | bool | str | Mapping[str, str] | tuple[str, ...] | None
PLACEMENTS = ("column", "row", "vocabulary", "heads", "channels", "experts", "replicated")


class Pairs(Mapping[str, str]):
    """An immutable, hashable mapping in alphabetical order.

    >>> Pairs({"b": "row", "a": "column"})
    Pairs({'a': 'column', 'b': 'row'})
    """

    def __init__(self, pairs: Mapping[str, str] | None = None) -> None:
        self._pairs = dict(sorted((pairs or {}).items(), key=str))

    def __getitem__(self, key: str) -> str:
        return self._pairs[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __hash__(self) -> int:
        return hash(tuple(self._pairs.items()))

    def __repr__(self) -> str:
        return f"Pairs({self._pairs})"


def parse_settings(text: str, defaults: Mapping[str, Value]) -> dict[str, Value]:
    """Settings by name from `key=value` joined by `,`. Raises `PlanError`.

    defaults: of all settings that there are; a value is parsed as the type of its default.
    """
    settings: dict[str, Value] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key or not value:
            raise PlanError(
                f"{part.strip()!r} in plan {text!r} is not key=value. A plan looks like dp=4,microbatches=2."
            )
        if key in settings:
            raise PlanError(f"{key} appears twice in plan {text!r}.")
        check_setting(key, defaults)
        settings[key] = _parse(key, value, defaults[key])
    return settings


def parse_json(text: str) -> dict[str, Any]:
    """Settings by name from a JSON object. Raises `PlanError`."""
    try:
        settings = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"This plan is not JSON: {error}.") from None
    if not isinstance(settings, dict):
        raise PlanError(f"A plan in JSON is an object of settings, not {type(settings).__name__}.")
    return settings


def text_of(value: Value) -> str:
    """A setting's value as `parse_settings` reads it.

    >>> text_of(("blocks.4", "blocks.8")), text_of(False), text_of(None), text_of(Pairs({"up": "row"}))
    ('blocks.4+blocks.8', 'false', 'inf', 'up:row')
    """
    if isinstance(value, Mapping):
        return "+".join(f"{pattern}:{placement}" for pattern, placement in value.items())
    if isinstance(value, tuple):
        return "+".join(value)
    if value is None:
        return "inf"
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_type(name: str, value: object, default: Value) -> None:
    """Raise `PlanError` if a setting is not of the type of its default. None stands for infinity."""
    if type(value) is not type(default) and not (default is None and type(value) is int):
        raise _wrong_type(name, repr(value), default)


def check_setting(name: str, known: Collection[str]) -> None:
    """Raise `PlanError` for a name that is no setting."""
    if name not in known:
        raise PlanError(f"A plan has no setting {name!r}. {_hint(name, known)}")


def check_known(name: str, value: str, known: Collection[str], gone: Mapping[str, str] = {}) -> None:
    """Raise `PlanError` for a value that is none of `known`. gone: values of earlier versions, with what to write instead."""
    if value in gone:
        raise PlanError(f"{name}={value} is gone. {gone[value]}")
    if value not in known:
        raise PlanError(f"{name}={value} is not known. {_hint(value, known)}")


def check_placement(pattern: object, placement: object) -> None:
    """Raise `PlanError` for an entry of `tp_placements` that is none."""
    if (
        not isinstance(pattern, str)
        or not isinstance(placement, str)
        or not pattern
        or any(mark in pattern for mark in ",+:= ")
    ):
        raise PlanError(
            f"tp_placements={pattern!r}:{placement!r} must be a pattern of module names and a placement, like blocks.*.up:column."
        )
    is_dim = placement.startswith("dim") and placement.removeprefix("dim").isdecimal()
    if placement not in PLACEMENTS and not is_dim:
        raise PlanError(
            f"tp_placements={pattern}:{placement} is not a placement. {_hint(placement, PLACEMENTS, ', dim0, dim1, ...')}"
        )


def _hint(word: str, known: Collection[str], others: str = ".") -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"Did you mean {near[0]}?" if near else f"Known: {', '.join(known)}{others}"


def _parse(key: str, text: str, default: Value) -> Value:
    if isinstance(default, str):
        return text
    if default is None and text == "inf":
        return None
    if isinstance(default, tuple):
        return tuple(each.strip() for each in text.split("+"))
    if isinstance(default, Mapping):
        return _parse_pairs(key, text)
    if key == "memory_bytes":
        return parse_bytes(text)
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text) if isinstance(default, float) else int(text)
    except ValueError:
        raise _wrong_type(key, text, default) from None


def _parse_pairs(key: str, text: str) -> Pairs:
    pairs: dict[str, str] = {}
    for part in text.split("+"):
        pattern, colon, value = (piece.strip() for piece in part.partition(":"))
        if not colon or not pattern or not value:
            raise PlanError(
                f"{part.strip()!r} in {key}={text} is not pattern:value. Pairs look like {key}=blocks.*.up:column+head:vocabulary."
            )
        if pattern in pairs:
            raise PlanError(f"{pattern} appears twice in {key}={text}.")
        pairs[pattern] = value
    return Pairs(pairs)


def _wrong_type(name: str, value: str, default: Value) -> PlanError:
    kinds: Mapping[Any, tuple[str, str]] = {
        int: ("a whole number", ""), float: ("a number", ""), bool: ("true or false", ""), str: ("a word", ""),
        type(None): ("a whole number, or inf", ""), tuple: ("names of modules", "blocks.4+blocks.8"),
        Pairs: ("pairs of patterns and placements", "blocks.*.up:column"),
    }  # fmt: skip
    expected, example = kinds[type(default)]
    return PlanError(f"{name}={value} must be {expected}, like {name}={example or text_of(default)}.")
