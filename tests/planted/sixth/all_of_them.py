"""The sixth list, complete: importing this module imports all that add to it."""

from __future__ import annotations

from tests.planted.sixth import (
    SIXTH,
    agreeing,
    feeding,
    measuring,
    piping,
    remembering,
    rounding,
    seeding,
    splitting,
    stepping,
    storing,
)

__all__ = [
    "SIXTH",
    "agreeing",
    "feeding",
    "measuring",
    "piping",
    "remembering",
    "rounding",
    "seeding",
    "splitting",
    "stepping",
    "storing",
]
