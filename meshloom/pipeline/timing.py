"""A schedule run on paper: when every action starts and ends, given what each takes. Nothing is executed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshloom.pipeline.check import legal_order, needs
from meshloom.pipeline.schedule import Action, Schedule


@dataclass(frozen=True, kw_only=True)
class Durations:
    """What actions take, in seconds or any one unit.

    forward, input_gradient, weight_gradient: [stage], for a whole microbatch; a backward that is not split takes both of the latter.
    transfer: from one rank to another, for any value.
    sizes: [microbatch], relative to a whole one; empty: all are whole.
    """

    forward: Sequence[float]
    input_gradient: Sequence[float]
    weight_gradient: Sequence[float]
    transfer: float = 0.0
    sizes: Sequence[float] = ()

    @staticmethod
    def alike(num_stages: int) -> Durations:
        """One unit for each."""
        return Durations(forward=[1.0] * num_stages, input_gradient=[1.0] * num_stages, weight_gradient=[1.0] * num_stages)

    def of(self, action: Action) -> float:
        """What one action takes."""
        stage = action.stage
        whole = {"F": (self.forward,), "I": (self.input_gradient,), "W": (self.weight_gradient,), "B": (self.input_gradient, self.weight_gradient)}
        return sum(each[stage] for each in whole[action.kind]) * (self.sizes[action.microbatch] if self.sizes else 1.0)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """starts, ends: of every action, in the unit that was given. busy: [rank], the sum of its actions."""

    starts: Mapping[Action, float]
    ends: Mapping[Action, float]
    busy: tuple[float, ...]

    @property
    def length(self) -> float:
        """From the first start to the last end."""
        return max(self.ends.values()) - min(self.starts.values())

    def idle_share(self, rank: int) -> float:
        """Of the whole length, how much of it a rank waits."""
        return 1.0 - self.busy[rank] / self.length if self.length else 0.0

    @property
    def mean_idle_share(self) -> float:
        """Over the ranks."""
        return sum(self.idle_share(rank) for rank in range(len(self.busy))) / len(self.busy)


def run_on_paper(
    schedule: Schedule,
    duration: Callable[[Action], float],
    transfer: Callable[[Action, Action], float] = lambda before, after: 0.0,
    order: Sequence[tuple[int, Action]] | None = None,
) -> Timed:
    """Every rank runs its list in order; an action starts when its rank is free and what it needs has arrived.

    duration: of an action. transfer: from the end of one action to when its value is on the other's rank.
    order: `legal_order` of the schedule, if it is known.
    Raises `AssertionError` for a schedule that waits in a circle: `check_schedule` comes first.
    """
    order = order or legal_order(schedule)
    assert order is not None, "check_schedule comes first"
    split = schedule.split
    free = [0.0] * schedule.num_ranks
    busy = [0.0] * schedule.num_ranks
    starts: dict[Action, float] = {}
    ends: dict[Action, float] = {}
    for rank, action in order:
        needed = needs(action, schedule.num_stages, (action.stage + 1, action.microbatch) in split)
        arrived = (ends[each] + (transfer(each, action) if schedule.ranks[each.stage] != rank else 0.0) for each in needed)
        starts[action] = max(free[rank], max(arrived, default=0.0))
        ends[action] = free[rank] = starts[action] + duration(action)
        busy[rank] += duration(action)
    return Timed(starts=starts, ends=ends, busy=tuple(busy))


def length_of(schedule: Schedule, durations: Durations) -> float:
    """What a step takes on paper."""
    return run_on_paper(schedule, durations.of, lambda before, after: durations.transfer).length
