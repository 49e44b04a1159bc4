"""A simulated schedule of ranks that share cores: the more of them compute at a time, the slower each is.

    rank 0   |== 0F0 ==|= 0F1 =|                     alone: full speed
    rank 1              |=== 1F0 ===|== 1F1 ==|      both busy on one core: each at half of it

With one speed for any number of busy ranks it is `pipeline/schedules/timing.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from meshloom.pipeline.schedules.check import needs
from meshloom.pipeline.schedules.schedule import Action, Schedule


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Seconds from the first start to the last end, and for each rank along pp the seconds in which it ran an
    action. [rank]"""

    seconds: float
    busy_seconds: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The cost of an action: seconds of computing if no other rank computes, then seconds of communication
    along tp, which other ranks do not slow down."""

    alone_seconds: float
    communication_seconds: float = 0.0


@dataclass
class _Running:
    action: Action
    arrives: float  # when its inputs are there
    alone: float  # seconds of computing left
    communication: float


def run_on_cores(
    schedule: Schedule,
    effort: Callable[[Action], Effort],
    transfer: Callable[[Action, Action], float],
    slowdown: Callable[[int], float],
) -> Shared:
    """Every rank runs its list in order; an action starts when its rank is free and its inputs have arrived.

    transfer: seconds from the end of one action until its value is on the other's rank. slowdown: of each
    rank, when so many ranks along pp compute. Raises `AssertionError` for a schedule that deadlocks:
    `check_schedule` comes first.
    """
    waiting = [list(reversed(actions)) for actions in schedule.actions]
    running: list[_Running | None] = [None] * schedule.num_ranks
    busy = [0.0] * schedule.num_ranks
    ends: dict[Action, float] = {}
    now = 0.0

    def arrival(rank: int, action: Action) -> float | None:
        """When all that it needs is there; None: not known yet."""
        found = 0.0
        for each in needs(action, schedule):
            if each not in ends:
                return None
            found = max(
                found, ends[each] + (transfer(each, action) if schedule.ranks[each.stage] != rank else 0.0)
            )
        return found

    while any(waiting) or any(running):
        for rank, left in enumerate(waiting):
            if running[rank] is None and left and (arrives := arrival(rank, left[-1])) is not None:
                takes = effort(action := left.pop())
                running[rank] = _Running(action, arrives, takes.alone_seconds, takes.communication_seconds)
        there = [each for each in running if each is not None and each.arrives <= now]
        computing = sum(each.alone > 0 for each in there)
        pace = slowdown(computing) if computing else 1.0
        until = [each.arrives - now for each in running if each is not None and each.arrives > now]
        until += [each.alone * pace if each.alone > 0 else each.communication for each in there]
        assert until, "check_schedule comes first"
        passed = min(until)
        for rank, each in enumerate(running):
            if each is None or each.arrives > now:
                continue
            busy[rank] += passed
            if each.alone > 0:
                each.alone = max(0.0, each.alone - passed / pace)
                each.alone = 0.0 if math.isclose(each.alone, 0.0, abs_tol=1e-12) else each.alone
            else:
                each.communication = max(0.0, each.communication - passed)
            if each.alone <= 0 and each.communication <= 1e-12:
                ends[each.action] = now + passed
                running[rank] = None
        now += passed
    return Shared(seconds=now, busy_seconds=tuple(busy))
