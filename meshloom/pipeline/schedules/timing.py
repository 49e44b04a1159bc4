"""A simulated schedule: when every action starts and ends, given the durations. Nothing is executed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshloom.pipeline.schedules.check import legal_order, needs
from meshloom.pipeline.schedules.schedule import Action, Schedule


@dataclass(frozen=True, kw_only=True)
class Durations:
    """The durations of actions, in seconds or any other unit.

    forward, input_gradient, weight_gradient: [stage], for a full microbatch; an unsplit backward takes the
        sum of the latter two. transfer: from one rank to another, for any value.
    sizes: [microbatch], relative to a full one; empty: all are full.
    sent, returned: [stage], in place of `transfer`: of what it sends to the next stage, and back to the one before.
    """

    forward: Sequence[float]
    input_gradient: Sequence[float]
    weight_gradient: Sequence[float]
    transfer: float = 0.0
    sizes: Sequence[float] = ()
    sent: Sequence[float] = ()
    returned: Sequence[float] = ()

    @staticmethod
    def uniform(num_stages: int) -> Durations:
        """One unit for each action."""
        ones = [1.0] * num_stages
        return Durations(forward=ones, input_gradient=ones, weight_gradient=ones)

    def of(self, action: Action) -> float:
        """The duration of an action."""
        stage, kind = action.stage, action.kind
        if kind == "F":
            duration = self.forward[stage]
        elif kind == "B":
            duration = self.input_gradient[stage] + self.weight_gradient[stage]
        else:
            duration = (self.input_gradient if kind == "I" else self.weight_gradient)[stage]
        return duration * self.sizes[action.microbatch] if self.sizes else duration

    def transfer_of(self, action: Action) -> float:
        """From the action's end to the arrival of its value on another rank."""
        of_stages = self.sent if action.kind == "F" else self.returned
        return of_stages[action.stage] if of_stages else self.transfer


@dataclass(frozen=True, kw_only=True)
class Timed:
    """starts, ends: of every action, in the given unit. busy: [rank], the sum of its actions."""

    starts: Mapping[Action, float]
    ends: Mapping[Action, float]
    busy: tuple[float, ...]

    @property
    def length(self) -> float:
        """From the first start to the last end."""
        return max(self.ends.values()) - min(self.starts.values())

    def idle_share(self, rank: int) -> float:
        """The fraction of the length that a rank waits."""
        return 1.0 - self.busy[rank] / self.length if self.length else 0.0

    @property
    def mean_idle_share(self) -> float:
        """The mean over all ranks."""
        return sum(self.idle_share(rank) for rank in range(len(self.busy))) / len(self.busy)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """An action of a rank. needed: earlier actions of its own rank that it depends on. received: actions
    of other ranks whose messages it needs."""

    rank: int
    action: Action
    needed: tuple[Action, ...]
    received: tuple[Action, ...]


def turns_of(schedule: Schedule) -> list[Turn]:
    """All actions, in an order that one thread could run.

    Raises `AssertionError` for a schedule that deadlocks: run `check_schedule` first.
    """
    order = legal_order(schedule)
    assert order is not None, "check_schedule comes first"
    found: list[Turn] = []
    for rank, action in order:
        needed = needs(action, schedule)
        received = tuple(each for each in needed if schedule.ranks[each.stage] != rank)
        own = tuple(each for each in needed if each not in received)
        found.append(Turn(rank=rank, action=action, needed=own, received=received))
    return found


def run_on_paper(
    schedule: Schedule,
    duration: Callable[[Action], float],
    transfer: Callable[[Action, Action], float] = lambda before, after: 0.0,
) -> Timed:
    """The start and end of every action: it starts when its rank is free and its messages have arrived.

    duration: of an action. transfer: from an action's end to the arrival of its value on the other's rank.
    Raises `AssertionError` for a schedule that deadlocks: run `check_schedule` first.
    """
    free = [0.0] * schedule.num_ranks
    busy = [0.0] * schedule.num_ranks
    starts: dict[Action, float] = {}
    ends: dict[Action, float] = {}
    for turn in turns_of(schedule):
        rank, action = turn.rank, turn.action
        start, takes = free[rank], duration(action)
        for each in turn.needed:
            start = max(start, ends[each])
        for each in turn.received:
            start = max(start, ends[each] + transfer(each, action))
        starts[action] = start
        ends[action] = free[rank] = start + takes
        busy[rank] += takes
    return Timed(starts=starts, ends=ends, busy=tuple(busy))


def length_of(schedule: Schedule, durations: Durations) -> float:
    """The simulated length of a step."""
    return run_on_paper(schedule, durations.of, lambda before, after: durations.transfer_of(before)).length
