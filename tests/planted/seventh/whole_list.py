"""The seventh list, complete: importing this module imports all that add to it."""

from __future__ import annotations

from tests.planted.seventh import (
    SEVENTH,
    archiving,
    assessing,
    holding,
    parting,
    passing,
    sharing,
    shortening,
    supplying,
    turning,
)

__all__ = [
    "SEVENTH",
    "archiving",
    "assessing",
    "holding",
    "parting",
    "passing",
    "sharing",
    "shortening",
    "supplying",
    "turning",
]
