"""The results of a rehearsal: for every rank of a plan its own seconds, what it sent and when, and what it
held.

Seconds are on a rank's *own clock*, which is stopped while the rank waits or communicates. So they are what
the rank computes, however slow others are; the cost of communication is added from the measured links
(`step_seconds.py`).

    own clock    0 ____ chunks ____ | exchange | update | exchange | end
    calls           ^    ^     ^        ^                   ^             (axis, kind, bytes) at a time of that clock
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from meshloom.core.mesh import Axis, MeshCoordinates
from meshloom.core.plan import Plan
from meshloom.pipeline.schedules.schedule import Schedule
from meshloom.pipeline.schedules.spans import Span
from meshloom.planner.memory.rank_memory import HeldBytes


@dataclass(frozen=True, kw_only=True)
class RehearsedCall:
    """An operation that a rank started. at: on its own clock. in_place: the tensor lay in memory that all
    ranks of the host can read. members: the ranks that take part; (): not known."""

    axis: Axis
    kind: str
    num_bytes: int
    ranks: int
    at: float
    in_place: bool = False
    members: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """One step of one rank. seconds: of its own clock. spans: its phases, on the same clock; actions of the
    schedule only where the plan has pp."""

    seconds: float
    spans: tuple[Span, ...]
    calls: tuple[RehearsedCall, ...]

    @property
    def num_bytes(self) -> Mapping[str, int]:
        """Axis -> bytes handed over, of all kinds."""
        found: dict[str, int] = {}
        for call in self.calls:
            if call.num_bytes:
                found[call.axis] = found.get(call.axis, 0) + call.num_bytes
        return found


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """Steps of a plan. places, held: [rank]. steps: [step][rank]. threads: of each rank. schedule: of the plan's pipeline, if it has one. one_copy:
    whether the replicas share one copy of parameters and optimizer state. ran: what ranks ran under, if that is
    another plan."""

    plan: Plan
    threads: int
    places: tuple[MeshCoordinates, ...]
    steps: tuple[tuple[RankStep, ...], ...]
    held: tuple[HeldBytes, ...]
    schedule: Schedule | None = None
    one_copy: bool = False
    ran: Plan | None = None

    @property
    def num_bytes(self) -> Mapping[str, int]:
        """Axis -> bytes that rank 0 hands over in a step, on average where steps differ (local steps)."""
        totals: dict[str, int] = {}
        for step in self.steps:
            for axis, count in step[0].num_bytes.items():
                totals[axis] = totals.get(axis, 0) + count
        return MappingProxyType({axis: round(count / len(self.steps)) for axis, count in totals.items()})
