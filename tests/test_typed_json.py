"""What was written of a frozen dataclass is read back as the same, and what was written of something else is
refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from meshloom.program.store.typed_json import plain, typed


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int
    share: float


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    kind: Literal["a", "b"]
    rows: tuple[Inner, ...]
    pairs: tuple[tuple[str, bool], ...]
    sizes: Mapping[tuple[str, int], int]
    note: str | None


OUTER = Outer(
    name="x",
    kind="b",
    rows=(Inner(size=1, share=0.1 + 0.2), Inner(size=2**70, share=float("inf"))),
    pairs=(("p", True),),
    sizes={("k", 3): 5},
    note=None,
)


def test_what_is_read_back_is_the_same():
    assert typed(Outer, json.loads(json.dumps(plain(OUTER)))) == OUTER
    assert typed(tuple[Outer, ...], plain((OUTER, OUTER))) == (OUTER, OUTER)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Inner, {"size": 1}), (Inner, {"size": 1, "share": 0.5, "more": 0}), (Inner, {"size": 1.0, "share": 0.5}),
        (Inner, {"size": 1, "share": "0.5"}), (Inner, [1, 0.5]),
        (int, True), (tuple[int, int], [1]), (Literal["a"], "c"), (str | None, 3), (Mapping[str, int], {"a": 1}),
    ],
)  # fmt: skip
def test_what_is_of_another_type_is_refused(kind: Any, value: Any):
    with pytest.raises(ValueError, match="is no"):
        typed(kind, value)
