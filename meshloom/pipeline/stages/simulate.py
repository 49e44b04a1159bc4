"""The simulated seconds of a step under a schedule: its length, and how long each rank waits.

Values for the next stage arrive some time after the action that produced them, while ranks compute. Values
that skip stages are ignored: they left earlier than those for the next stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from meshloom.pipeline.schedules.schedule import Action, Kind, Schedule
from meshloom.pipeline.schedules.timing import Durations, run_on_paper, turns_of
from meshloom.pipeline.stages.intervals import StageCost


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A step. idle_shares: [rank], of the step's seconds.

    even_idle_share: of all ranks under the same schedule if all stages were equal, their backward took twice
        their forward, and messages took no time: (p - 1) / (m + p - 1) for gpipe and 1f1b.
    """

    seconds: float
    idle_shares: tuple[float, ...]
    even_idle_share: float

    @property
    def idle_share(self) -> float:
        """The mean over all ranks."""
        return sum(self.idle_shares) / len(self.idle_shares)


MessageSeconds = Callable[[float], float]  # bytes -> seconds from one rank to another


def simulate(
    schedule: Schedule,
    stages: Sequence[StageCost],
    message_seconds: MessageSeconds,
    *,
    sizes: Sequence[float] = (),
) -> Simulated:
    """A step of these stages. sizes: [microbatch], relative to that of `stages`; default: all are full."""
    there, back = [each.sent_bytes for each in stages], [each.handed_back_bytes for each in stages]

    def transfer(before: Action, after: Action) -> float:
        num_bytes = (there if before.kind == "F" else back)[before.stage]
        return message_seconds(num_bytes * sizes[before.microbatch] if sizes else num_bytes)

    timed = run_on_paper(schedule, _durations_of(stages, sizes).of, transfer)
    return Simulated(
        seconds=timed.length,
        idle_shares=tuple(timed.idle_share(rank) for rank in range(schedule.num_ranks)),
        even_idle_share=run_on_paper(schedule, Durations.uniform(schedule.num_stages).of).mean_idle_share,
    )


def step_seconds(
    schedule: Schedule, message_seconds: MessageSeconds, *, sizes: Sequence[float] = ()
) -> Callable[[Sequence[StageCost]], float]:
    """Stages -> seconds of a step, for trying many of them, as `choose_cuts` does.

    Equal to `simulate`, but numbered: durations by kind, stage and size are looked up once, and actions of a
    rank only need their order.
    """
    turns = turns_of(schedule)
    kinds: dict[tuple[Kind, int, float], int] = {}
    place = {turn.action: number for number, turn in enumerate(turns)}

    def kind_of(action: Action) -> int:
        size = sizes[action.microbatch] if sizes else 1.0
        return kinds.setdefault((action.kind, action.stage, size), len(kinds))

    steps = [
        (turn.rank, kind_of(turn.action), tuple((place[each], kind_of(each)) for each in turn.received))
        for turn in turns
    ]
    seconds = cache(message_seconds)

    def length(stages: Sequence[StageCost]) -> float:
        durations = _durations_of(stages)
        takes = [durations.of(Action(stage, kind, 0)) * size for kind, stage, size in kinds]
        travels = [
            seconds((stages[stage].sent_bytes if kind == "F" else stages[stage].handed_back_bytes) * size)
            for kind, stage, size in kinds
        ]
        free = [0.0] * schedule.num_ranks
        ends: list[float] = []
        for rank, kind, received in steps:
            start = free[rank]
            for number, sent in received:
                start = max(start, ends[number] + travels[sent])
            free[rank] = end = start + takes[kind]
            ends.append(end)
        return max(ends)  # the first starts at 0

    return length


def durations_of(
    stages: Sequence[StageCost], message_seconds: MessageSeconds, sizes: Sequence[int]
) -> Durations:
    """The durations of these stages' actions, with their messages. sizes: [microbatch], samples; the largest first."""
    even = min(sizes) == sizes[0]
    return replace(
        _durations_of(stages, () if even else [size / sizes[0] for size in sizes]),
        sent=[message_seconds(each.sent_bytes) for each in stages],
        returned=[message_seconds(each.handed_back_bytes) for each in stages],
    )


def _durations_of(stages: Sequence[StageCost], sizes: Sequence[float] = ()) -> Durations:
    return Durations(
        forward=[each.forward_seconds for each in stages],
        input_gradient=[each.backward_seconds - each.later_seconds for each in stages],
        weight_gradient=[each.later_seconds for each in stages],
        sizes=sizes,
    )
