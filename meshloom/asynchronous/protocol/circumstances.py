"""What happens on a virtual clock: speeds of workers, latencies, and who comes, goes and is killed when.

incidents = parse_incidents("kill:2@10+join:2@15+server:0@30/5")
Circumstances(step_seconds=(1, 1, 1, 3), latency_seconds=0.01, incidents=incidents)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from meshloom.core.errors import PlanError

Happening = Literal["kill", "join", "leave", "suspect", "server"]
HAPPENINGS: tuple[Happening, ...] = get_args(Happening)


@dataclass(frozen=True, kw_only=True)
class Incident:
    """At `at_seconds` worker `number` is killed, joins, leaves, or counts as lost although it lives; or
    server `number` is killed for `away_seconds`."""

    what: Happening
    number: int
    at_seconds: float
    away_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.what not in HAPPENINGS:
            raise PlanError(f"{self.what} is nothing that can happen. Known: {', '.join(HAPPENINGS)}.")
        if self.number < 0 or not _is_time(self.at_seconds) or not _is_time(self.away_seconds):
            raise PlanError(
                f"{self.what}:{self.number}@{self.at_seconds:g}/{self.away_seconds:g} must have no number below 0."
            )


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """How a virtual run goes.

    step_seconds: what each worker needs for a share; beyond the last, again from the first. Empty: 1 s each.
    latency_seconds: of every message between two processes.
    jitter: step and message seconds vary by up to this part of them, either way.
    notice_seconds: how long until the head knows that a worker was killed.
    """

    step_seconds: tuple[float, ...] = ()
    latency_seconds: float = 0.0
    jitter: float = 0.0
    notice_seconds: float = 1.0
    incidents: tuple[Incident, ...] = ()

    def __post_init__(self) -> None:
        if not all(_is_time(seconds) and seconds > 0 for seconds in self.step_seconds):
            raise PlanError(
                f"step_seconds={'/'.join(f'{each:g}' for each in self.step_seconds)} must be seconds above 0, like 1/1/1/3."
            )
        are_times = _is_time(self.latency_seconds) and _is_time(self.notice_seconds)
        if not are_times or not 0 <= self.jitter < 1:
            raise PlanError(
                f"latency_seconds={self.latency_seconds:g} and notice_seconds={self.notice_seconds:g} must be 0 or more, jitter={self.jitter:g} from 0 to "
                "less than 1."
            )

    def seconds_of(self, worker: int) -> float:
        """What the worker needs for a share, without jitter."""
        return self.step_seconds[worker % len(self.step_seconds)] if self.step_seconds else 1.0


def parse_incidents(text: str) -> tuple[Incident, ...]:
    """Incidents as text: `what:number@seconds` joined by `+`; for a server `/seconds` that it is away.

    >>> parse_incidents("kill:2@10+server:0@30.5/5")[1]
    Incident(what='server', number=0, at_seconds=30.5, away_seconds=5.0)

    Raises `PlanError`.
    """
    incidents: list[Incident] = []
    for part in text.split("+"):
        what, _, rest = part.strip().partition(":")
        number, _, when = rest.partition("@")
        at, _, away = when.partition("/")
        try:
            happening, seconds_away = HAPPENINGS[HAPPENINGS.index(what)], float(away or 0)
            incidents.append(
                Incident(what=happening, number=int(number), at_seconds=float(at), away_seconds=seconds_away)
            )
        except ValueError:
            raise PlanError(
                f"{part.strip()!r} is no incident. They look like kill:2@10, join:4@15, leave:1@20, suspect:0@25 and server:0@30/5 (away for 5 s), joined by +."
            ) from None
    return tuple(incidents)


def _is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds >= 0
