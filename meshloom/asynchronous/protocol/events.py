"""What the head of an asynchronous run reports: updates, snapshots, servers that went back to one, and
workers that were expelled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Update:
    """Update `version`: the gradient of `share` by `worker`. age: updates since the parameters at which it
    was computed. gap: of the clocks then."""

    version: int
    worker: int
    share: int
    age: int
    loss: float
    norm: float
    gap: int


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All servers have kept their parts after update `version`. Reported again when they go back to it."""

    version: int
    state: Any


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The servers are at update `version`, in a new incarnation; the `lost` updates after it are gone."""

    version: int
    lost: int
    incarnation: int


@dataclass(frozen=True, kw_only=True)
class Expelled:
    """A push of this worker was not finite: it is not applied, its share is given out again, and the worker
    may not come back."""

    worker: int


Event = Update | Snapshot | Restored | Expelled
