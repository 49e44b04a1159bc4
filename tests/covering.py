"""Few cases of many settings, in which any two or three values of different settings meet; names that take
values in turn; and the first few of many."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, cycle, product
from typing import Any

import pytest

Case = dict[str, Any]
Values = tuple[tuple[str, str], ...]  # of different settings, each with its value as text


def covering(settings: Mapping[str, Sequence[Any]], strength: int, *, candidates: int = 60) -> list[Case]:
    """Cases in which every `strength` values of different settings meet, found greedily among random
    candidates; the same ones every time."""
    missing = all_meetings(settings, strength)
    shuffled = random.Random(0)
    chosen: list[Case] = []
    while missing:
        # so that every round makes progress
        wanted = {name: _value(settings, name, text) for name, text in min(missing)}
        drawn = [
            {name: shuffled.choice(values) for name, values in settings.items()} | wanted
            for _ in range(candidates)
        ]
        best = max(drawn, key=lambda case: len(missing & meetings(case, strength)))
        chosen.append(best)
        missing -= meetings(best, strength)
    return chosen


def meetings(case: Mapping[str, Any], strength: int) -> set[Values]:
    """What meets in a case."""
    return set(combinations(sorted((name, str(value)) for name, value in case.items()), strength))


def all_meetings(settings: Mapping[str, Sequence[Any]], strength: int) -> set[Values]:
    """What can meet."""
    return {
        tuple((name, str(value)) for name, value in zip(names, values, strict=True))
        for names in combinations(sorted(settings), strength)
        for values in product(*(settings[name] for name in names))
    }


def in_turn(names: Sequence[str], values: Sequence[Any], each: int = 1) -> list[tuple[str, Any]]:
    """`each` of the values for every name: the next name has the next ones, so that all values are as
    frequent, and neighbours, which are alike, differ."""
    following = cycle(values)
    return [(name, next(following)) for name in names for _ in range(each)]


def slow(*values: Any) -> Any:
    """A case of a test that is marked so."""
    return pytest.param(*values, marks=pytest.mark.slow)


def marked(
    usual: Iterable[tuple[str, str]], often: Iterable[tuple[str, str]], rest: Iterable[tuple[str, str]]
) -> list[Any]:
    """Cases of a test: what is usual; what is tried often, which is long; and the rest, which is slow."""
    marks: dict[tuple[str, str], Any] = {**dict.fromkeys(often, pytest.mark.long), **dict.fromkeys(usual, ())}
    return [
        pytest.param(*each, marks=marks.get(each, pytest.mark.slow))
        for each in dict.fromkeys([*marks, *rest])
    ]


def few(values: Iterable[Any], count: int = 1, rest: Any = pytest.mark.long) -> list[Any]:
    """Parameters of a test, of which all but the first `count` are marked as `rest`."""
    return [value if number < count else _marked(value, rest) for number, value in enumerate(values)]


def _marked(value: Any, mark: Any) -> Any:
    if hasattr(value, "marks"):  # it is a parameter already
        return pytest.param(*value.values, marks=[*value.marks, mark], id=value.id)
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark)


def _value(settings: Mapping[str, Sequence[Any]], name: str, text: str) -> Any:
    return next(value for value in settings[name] if str(value) == text)
