"""What a step takes under a schedule, from what its stages take: its length, and how long each rank waits. Nothing is executed.

Values that go to the next stage arrive some time after the action that made them; ranks compute meanwhile. What skips stages is not waited for:
it left earlier than what the next stage needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from meshloom.graph.intervals import StageCost
from meshloom.pipeline.schedule import Action, Schedule
from meshloom.pipeline.timing import Durations, Timed, run_on_paper, turns_of


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A step. idle_shares: [rank], of the step's seconds. busy_seconds: [rank], computing.

    even_idle_share: of all ranks under the same schedule if its stages were alike, their backward took twice their forward, and nothing were sent:
        (p - 1) / (m + p - 1) for gpipe and 1f1b.
    """

    seconds: float
    idle_shares: tuple[float, ...]
    busy_seconds: tuple[float, ...]
    even_idle_share: float

    @property
    def idle_share(self) -> float:
        """Of all ranks."""
        return sum(self.idle_shares) / len(self.idle_shares)


MessageSeconds = Callable[[float], float]  # bytes -> from one rank to another


def simulate(schedule: Schedule, stages: Sequence[StageCost], message_seconds: MessageSeconds, *, sizes: Sequence[float] = ()) -> Simulated:
    """A step of these stages. sizes: [microbatch], relative to that of `stages`; default: all are as large."""
    timed = _timer(schedule, message_seconds, sizes)(stages)
    return Simulated(
        seconds=timed.length,
        idle_shares=tuple(timed.idle_share(rank) for rank in range(schedule.num_ranks)),
        busy_seconds=timed.busy,
        even_idle_share=run_on_paper(schedule, Durations.alike(schedule.num_stages).of).mean_idle_share,
    )


def step_seconds(schedule: Schedule, message_seconds: MessageSeconds, *, sizes: Sequence[float] = ()) -> Callable[[Sequence[StageCost]], float]:
    """Stages -> seconds of a step of them; for trying many, as `graph.cut.choose_cuts` does."""
    timer = _timer(schedule, message_seconds, sizes)
    return lambda stages: timer(stages).length


def _timer(schedule: Schedule, message_seconds: MessageSeconds, sizes: Sequence[float]) -> Callable[[Sequence[StageCost]], Timed]:
    turns, seconds = turns_of(schedule), cache(message_seconds)

    def timed(stages: Sequence[StageCost]) -> Timed:
        there, back = [each.sent_bytes for each in stages], [each.handed_back_bytes for each in stages]

        def transfer(before: Action, after: Action) -> float:
            num_bytes = (there if before.kind == "F" else back)[before.stage]
            return seconds(num_bytes * sizes[before.microbatch] if sizes else num_bytes)

        return run_on_paper(schedule, durations_of(stages, sizes=sizes).of, transfer, turns)

    return timed


def durations_of(stages: Sequence[StageCost], *, transfer: float = 0.0, sizes: Sequence[float] = ()) -> Durations:
    """What the actions of these stages take; a schedule that splits no backward takes both halves at once."""
    return Durations(
        forward=[each.forward_seconds for each in stages],
        input_gradient=[each.backward_seconds - each.later_seconds for each in stages],
        weight_gradient=[each.later_seconds for each in stages],
        transfer=transfer,
        sizes=sizes,
    )
