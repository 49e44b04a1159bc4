"""Bytes and numbers of things as people read them, in sentences."""

from __future__ import annotations


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
