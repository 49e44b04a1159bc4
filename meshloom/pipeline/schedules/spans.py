"""A span of time of a rank's step, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from meshloom.core.errors import ReportError
from meshloom.pipeline.schedules.schedule import Action
from meshloom.pipeline.schedules.schedule import Kind as ActionKind

SpanKind = Literal["F", "B", "I", "W", "recompute", "wait", "exchange", "update"]
ACTION_KINDS: tuple[ActionKind, ...] = get_args(ActionKind)


@dataclass(frozen=True, kw_only=True)
class Span:
    """From `start` to `stop`, in seconds on a clock shared by all spans of a timeline.

    kind: of an action of the schedule (F, B, I, W), or
        recompute   recomputing a forward, within a backward
        wait        waiting for an action's messages
        exchange    waiting for the exchange of gradients after all actions
        update      the optimizer's update
    stage, microbatch: those of the span, if it has any.
    """

    kind: SpanKind
    start: float
    stop: float
    stage: int | None = None
    microbatch: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(SpanKind):
            raise ReportError(
                f"A span of kind {self.kind!r} is not known. Kinds are {', '.join(get_args(SpanKind))}."
            )
        if not self.start <= self.stop:
            raise ReportError(f"A span cannot stop at {self.stop} s when it starts at {self.start} s.")
        if self.kind in ACTION_KINDS and (self.stage is None or self.microbatch is None):
            raise ReportError(
                f"A span of kind {self.kind} belongs to a stage and a microbatch, and has {self.stage} and {self.microbatch}."
            )

    @property
    def seconds(self) -> float:
        """The span's length."""
        return self.stop - self.start

    @property
    def action(self) -> Action | None:
        """The action of the schedule, if it is one."""
        if self.stage is None or self.microbatch is None:
            return None
        return next(
            (Action(self.stage, kind, self.microbatch) for kind in ACTION_KINDS if kind == self.kind), None
        )

    @property
    def name(self) -> str:
        """The label of the span in a picture.

        >>> Span(kind="F", start=0.0, stop=1.0, stage=2, microbatch=0).name, Span(kind="update", start=0.0, stop=1.0).name
        ('2F0', 'update')
        """
        return str(self.action or self.kind)
