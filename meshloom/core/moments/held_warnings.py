"""Warnings of code that is run before a run begins, to find out what it does: told after the run's first line, or not at all."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_OWN = str(Path(__file__).parents[2])  # of this package


@contextmanager
def held_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """A context in which warnings are collected in place of being shown; where it ends in an error, they are shown before that.

    >>> with held_warnings() as held:
    ...     warnings.simplefilter("always")
    ...     warnings.warn("slow", stacklevel=1)
    >>> [str(each.message) for each in held]
    ['slow']
    """
    held: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            try:
                yield held
            finally:
                held += caught
    except BaseException:
        show_warnings(held)
        raise


def show_warnings(held: Sequence[warnings.WarningMessage]) -> None:
    """Show each once, but those of lines of our own, which say what only a trial did."""
    told: set[tuple[str, str, int]] = set()
    for each in held:
        place = (str(each.message), each.filename, each.lineno)
        if place not in told and not each.filename.startswith(_OWN):
            told.add(place)
            warnings.showwarning(each.message, each.category, each.filename, each.lineno)
