"""The ninth list, complete: importing this module imports all that add to it."""

from __future__ import annotations

from tests.planted.ninth import (
    NINTH,
    buffering,
    dividing,
    exchanging,
    lowering,
    reading,
    staging,
    updating,
)

__all__ = [
    "NINTH",
    "buffering",
    "dividing",
    "exchanging",
    "lowering",
    "reading",
    "staging",
    "updating",
]
