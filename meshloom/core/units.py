"""Bytes, seconds and counts: as people read and write them, and in whole units."""

from __future__ import annotations

from meshloom.core.errors import PlanError


def format_bytes(num_bytes: float) -> str:
    """Three digits and a unit.

    >>> format_bytes(0), format_bytes(1000), format_bytes(2048), format_bytes(1500 * 2**20), format_bytes(700 * 2**30)
    ('0 B', '1000 B', '2 KiB', '1.46 GiB', '700 GiB')
    """
    for exponent, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 2**exponent * 0.9995:
            return f"{_three_digits(num_bytes / 2**exponent)} {unit}"
    return f"{num_bytes:.0f} B"


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is not smaller.

    >>> round_up(0, 64), round_up(1, 64), round_up(64, 64)
    (0, 64, 64)
    """
    return -(-number // multiple) * multiple


def parse_bytes(text: str) -> int:
    """Bytes as people write them. Raises `PlanError`.

    >>> parse_bytes("8GiB"), parse_bytes("1.5MB"), parse_bytes("4096")
    (8589934592, 1500000, 4096)
    """
    number = text.rstrip("KMGTiB ")
    scale = {"": 1, "B": 1, **{f"{unit}B": 1000**power for power, unit in enumerate("KMGT", 1)}}
    scale |= {f"{unit}iB": 1024**power for power, unit in enumerate("KMGT", 1)}
    try:
        return int(float(number) * scale[text[len(number) :].strip()])
    except (ValueError, KeyError, OverflowError):
        raise PlanError(f"{text} is no number of bytes. Write it like 8GiB, 500MB or 4096.") from None


def format_seconds(seconds: float) -> str:
    """Three digits and a unit.

    >>> format_seconds(0.0000021), format_seconds(0.0137), format_seconds(2.5), format_seconds(90.0), format_seconds(7200.0)
    ('2.1 us', '13.7 ms', '2.5 s', '1.5 min', '2 h')
    """
    for limit, unit in ((3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")):
        if seconds >= 0.9995 * limit:
            return f"{seconds / limit:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def format_clock(seconds: float) -> str:
    """Minutes and seconds, or hours as well.

    >>> format_clock(75), format_clock(3700)
    ('1:15', '1:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_number(number: float) -> str:
    """Three digits and a prefix.

    >>> format_number(0), format_number(1234), format_number(175e9), format_number(2.4e15)
    ('0', '1.23k', '175G', '2.4P')
    """
    for limit, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit * 0.9995:
            return f"{_three_digits(number / limit)}{prefix}"
    return f"{number:.3g}"


def format_count(number: int, noun: str) -> str:
    """A number of things.

    >>> format_count(1, "step"), format_count(3, "step"), format_count(2, "microbatch")
    ('1 step', '3 steps', '2 microbatches')
    """
    return f"{number} {plural(noun, number)}"


def plural(noun: str, number: int) -> str:
    """A noun as it stands after a number.

    >>> plural("rank", 1), plural("rank", 2), plural("process", 2)
    ('rank', 'ranks', 'processes')
    """
    return noun if number == 1 else f"{noun}{'es' if noun.endswith(('ch', 'ss')) else 's'}"


def _three_digits(number: float) -> str:
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"
