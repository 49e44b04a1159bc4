"""Bytes, seconds and counts are short where they are printed: three digits and a unit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshloom.core.units import format_bytes, format_clock, format_count, format_number, format_seconds


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (format_number, 999.4, "999"),
        (format_number, 999_950, "1M"),
        (format_number, 2.5e9, "2.5G"),
        (format_bytes, 1023, "1023 B"),
        (format_bytes, 1010 * 2**10, "1010 KiB"),
        (format_bytes, 2**30, "1 GiB"),
        (format_bytes, 5000 * 2**40, "5000 TiB"),
        (format_seconds, 0.0, "0 us"),
        (format_seconds, 0.99999, "1 s"),
        (format_seconds, 100 * 3600, "100 h"),
        (format_clock, 59.6, "1:00"),
    ],
)
def test_numbers_are_short(function: Callable[[float], str], value: float, text: str) -> None:
    assert function(value) == text


def test_nouns_follow_their_number() -> None:
    assert [format_count(number, "process") for number in (0, 1, 2)] == [
        "0 processes",
        "1 process",
        "2 processes",
    ]
