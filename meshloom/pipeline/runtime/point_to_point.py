"""The order of sends and receives, derived from a schedule and from the values that stages exchange.

    pair (0, 1), both ranks:    0F0>1   0F1>1   1B0>0   0F2>1   1B1>0   ...

All messages between two ranks, in both directions, have one order: that in which they become ready in the
simulated schedule. Both ranks start them in this order, so that they match even on transports where a send
needs a posted receive. A send starts as soon as its value exists. A receive starts before everything after it
in the pair's order, and if possible one action before it is needed: one receive per pair is kept posted, so
that a message travels while the rank computes. This costs the memory of one message per neighbour. A rank
only waits for what its next action needs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshloom.core.errors import PlanError
from meshloom.pipeline.schedules.schedule import Action, Schedule
from meshloom.pipeline.schedules.timing import Durations, run_on_paper


class Edge(NamedTuple):
    """Values are sent from one stage to a later one. back: their gradients return."""

    source: int
    destination: int
    back: bool


class StageMessage(NamedTuple):
    """All values that one stage sends to another for one microbatch. produced_by: the action that does."""

    source: int
    destination: int
    microbatch: int
    produced_by: Action

    def __str__(self) -> str:
        return f"{self.produced_by}>{self.destination}"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A rank's action with its messages.

    receives: started before the action. awaits: those that it needs, started now or earlier.
    posts: started after it, in order; True: a send. stays: values for other stages of this rank.
    """

    action: Action
    receives: tuple[StageMessage, ...]
    awaits: tuple[StageMessage, ...]
    posts: tuple[tuple[StageMessage, bool], ...]
    stays: tuple[StageMessage, ...]


def steps_of(schedule: Schedule, edges: Sequence[Edge], ahead: int = 1) -> tuple[tuple[Step, ...], ...]:
    """Every rank's actions with their messages. edges: stages that exchange values, at least all neighbours
    that do.

    ahead: receives of a pair that may be posted before they are needed.
    """
    messages_of = _messages(schedule, edges)
    order = _order_of_pairs(schedule, messages_of)
    return tuple(
        _steps_of_rank(schedule, rank, messages_of, order, ahead) for rank in range(schedule.num_ranks)
    )


def message_of(schedule: Schedule, source: int, destination: int, microbatch: int) -> StageMessage:
    """The values from one stage to a later one, or their gradients from the later one to the earlier."""
    forward = Action(source, "F", microbatch)
    produced_by = forward if source < destination else schedule.backward_of(source, microbatch)
    return StageMessage(source, destination, microbatch, produced_by)


def _messages(schedule: Schedule, edges: Sequence[Edge]) -> Messages:
    """Action -> the messages that it needs and those that it produces, those within a rank included."""
    found: Messages = {action: ([], []) for _, action in schedule}
    for edge in edges:
        for number in range(schedule.num_microbatches):
            forward = message_of(schedule, edge.source, edge.destination, number)
            found[forward.produced_by][1].append(forward)
            found[Action(edge.destination, "F", number)][0].append(forward)
            if edge.back:
                back = message_of(schedule, edge.destination, edge.source, number)
                found[back.produced_by][1].append(back)
                found[schedule.backward_of(edge.source, number)][0].append(back)
    return found


Pair = tuple[int, int]
Messages = dict[Action, tuple[list[StageMessage], list[StageMessage]]]


def _order_of_pairs(schedule: Schedule, messages_of: Messages) -> dict[Pair, list[StageMessage]]:
    ends = run_on_paper(schedule, Durations.uniform(schedule.num_stages).of).ends
    order: dict[Pair, list[StageMessage]] = {}
    for action in sorted(messages_of, key=lambda each: (ends[each], each)):
        for message in messages_of[action][1]:
            pair = _pair(schedule, message)
            if pair[0] != pair[1]:
                order.setdefault(pair, []).append(message)
    return order


def _pair(schedule: Schedule, message: StageMessage) -> Pair:
    ranks = schedule.ranks[message.source], schedule.ranks[message.destination]
    return min(ranks), max(ranks)


def _steps_of_rank(
    schedule: Schedule,
    rank: int,
    messages_of: Messages,
    order: Mapping[Pair, Sequence[StageMessage]],
    ahead: int,
) -> tuple[Step, ...]:
    queues = {pair: deque(messages) for pair, messages in order.items() if rank in pair}
    started: set[StageMessage] = set()
    num_open = Counter[Pair]()  # receives started and not yet needed
    steps: list[Step] = []

    def start_until(message: StageMessage) -> list[tuple[StageMessage, bool]]:
        """Starts a message and all before it in its pair's order."""
        queue = queues[_pair(schedule, message)]
        begun: list[tuple[StageMessage, bool]] = []
        while message not in started:
            first = queue.popleft()
            started.add(first)
            is_send = schedule.ranks[first.source] == rank
            num_open[_pair(schedule, first)] += not is_send
            begun.append((first, is_send))
        return begun

    def start_ahead(pair: Pair) -> list[tuple[StageMessage, bool]]:
        """Starts the next receives in the pair's order, up to `ahead`."""
        queue, begun = queues[pair], list[tuple[StageMessage, bool]]()
        while queue and schedule.ranks[queue[0].source] != rank and num_open[pair] < ahead:
            begun.append((queue.popleft(), False))
            started.add(begun[-1][0])
            num_open[pair] += 1
        return begun

    for action in schedule.actions[rank]:
        needed, sent = (
            [each for each in messages if _crosses(schedule, each)] for messages in messages_of[action]
        )
        before = [each for message in needed for each in start_until(message)]
        if any(is_send for _, is_send in before):
            raise PlanError(
                f"{action} of schedule {schedule.name} needs a message that comes after one of its own rank's in their order."
            )
        num_open.subtract(_pair(schedule, each) for each in needed)
        before += [each for pair in queues for each in start_ahead(pair)]
        stays = tuple(each for each in messages_of[action][1] if not _crosses(schedule, each))
        after = tuple(each for message in sent for each in start_until(message))
        receives = tuple(each for each, _ in before)
        steps.append(Step(action=action, receives=receives, awaits=tuple(needed), posts=after, stays=stays))
    return tuple(steps)


def _crosses(schedule: Schedule, message: StageMessage) -> bool:
    return schedule.ranks[message.source] != schedule.ranks[message.destination]
