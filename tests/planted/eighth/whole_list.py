"""The eighth list, complete: importing this module imports all that add to it."""

from __future__ import annotations

from tests.planted.eighth import (
    EIGHTH,
    buffering,
    dividing,
    drawing,
    evaluating,
    exchanging,
    keeping,
    lowering,
    reading,
    staging,
    updating,
)

__all__ = [
    "EIGHTH",
    "buffering",
    "dividing",
    "drawing",
    "evaluating",
    "exchanging",
    "keeping",
    "lowering",
    "reading",
    "staging",
    "updating",
]
