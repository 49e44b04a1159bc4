"""Bytes and numbers of things as people read and write them, in sentences."""

from __future__ import annotations

from meshloom.core.errors import PlanError


def amount(num_bytes: float) -> str:
    """In the largest unit of which there is one, with one decimal.

    >>> amount(1000), amount(10035), amount(3 * 2**29), amount(5 * 2**40)
    ('1000 B', '9.8 KiB', '1.5 GiB', '5120.0 GiB')
    """
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def how_many(number: int, noun: str) -> str:
    """A number of things.

    >>> how_many(1, "step"), how_many(3, "step"), how_many(2, "microbatch")
    ('1 step', '3 steps', '2 microbatches')
    """
    return f"{number} {noun}{('es' if noun.endswith('ch') else 's') * (number != 1)}"


def num_bytes_of(text: str) -> int:
    """Bytes as people write them. Raises `PlanError`.

    >>> num_bytes_of("8GiB"), num_bytes_of("1.5MB"), num_bytes_of("4096")
    (8589934592, 1500000, 4096)
    """
    number = text.rstrip("KMGTiB ")
    scale = {"": 1, "B": 1, **{f"{unit}B": 1000**power for power, unit in enumerate("KMGT", 1)}}
    scale |= {f"{unit}iB": 1024**power for power, unit in enumerate("KMGT", 1)}
    try:
        return int(float(number) * scale[text[len(number) :].strip()])
    except (ValueError, KeyError, OverflowError):
        raise PlanError(f"{text} is no number of bytes. Write it like 8GiB, 500MB or 4096.") from None
