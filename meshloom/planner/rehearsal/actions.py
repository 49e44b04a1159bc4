"""The costs of each action of a pipeline in a rehearsal: computing, communication along tp within it, and the
messages sent after it.

    own clock    |  gap  |== 0F1 ==|   gap   |==== 0B0 ====|
    along tp         ^       ^  ^       ^        ^               belongs to the action that it is in or before
    along pp                        ^                       ^    sends belong to the action before

A gap is what a rank computes between two actions: it belongs to the following one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshloom.pipeline.schedules.schedule import Action
from meshloom.pipeline.schedules.spans import ACTION_KINDS
from meshloom.planner.rehearsal.rehearsal import RankStep, RehearsedCall


@dataclass(frozen=True, kw_only=True)
class Took:
    """Seconds of one action on one rank."""

    alone: float
    communication: float
    sending: float


@dataclass(frozen=True, kw_only=True)
class Pipelined:
    """A rank's chunks. actions: the costs of each. around: computing before the first and after the last.
    rest: communication that belongs to none."""

    actions: dict[Action, Took]
    around: float
    rest: float


def pipelined(
    step: RankStep, calls: Sequence[RehearsedCall], until: float, seconds: Callable[[RehearsedCall], float]
) -> Pipelined:
    """A rank's chunks until `until` on its own clock. calls: along pp and tp within them. seconds: of a
    call."""
    spans = [span for span in step.spans if span.kind in ACTION_KINDS]
    first, last = spans[0].start, spans[-1].stop
    took: dict[Action, Took] = {}
    counted, free = 0.0, first  # free: since when the rank has had nothing to do
    for span, next_start in zip(spans, [*(each.start for each in spans[1:]), until], strict=True):
        assert span.action is not None
        communication = sum(
            seconds(call) for call in calls if call.axis == "tp" and free <= call.at < span.stop
        )
        sending = sum(
            seconds(call)
            for call in calls
            if call.kind == "send" and call.axis == "pp" and span.stop <= call.at <= next_start
        )
        took[span.action] = Took(alone=span.stop - free, communication=communication, sending=sending)
        counted += communication + sending
        free = span.stop
    return Pipelined(
        actions=took, around=first + until - last, rest=max(0.0, sum(map(seconds, calls)) - counted)
    )
