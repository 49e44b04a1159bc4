"""Records when a rank's actions and other parts of a step begin and end; gathers the timeline of all ranks.

    recorder.begin()                      0F0      0F1   recompute 0B0
    PipelineRun(...).run(recorder)   |....[###]....[###]..[##======]      .... wait: derived from the gaps afterwards
    with recorder.span("update")

A record costs a fraction of a microsecond on the CPU. On a GPU, where calls return before their work is done,
it is an event in the stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from meshloom.comm.group import Group
from meshloom.comm.network.clocks import clock_offsets
from meshloom.comm.objects import collect
from meshloom.core.mesh import MeshCoordinates
from meshloom.pipeline.schedules.schedule import Action, Schedule
from meshloom.pipeline.schedules.spans import Span, SpanKind
from meshloom.telemetry.timeline import Timeline, TimelineRow


@dataclass(frozen=True)
class _Other:
    """A span that is no action."""

    kind: SpanKind
    stage: int | None
    microbatch: int | None


class Recorder:
    """A listener of `PipelineRun.run`.

    device: on which the rank computes. clock: in nanoseconds, instead of `time.perf_counter_ns`.
    """

    def __init__(self, device: torch.device, clock: Callable[[], int] | None = None) -> None:
        self._device = device
        self._on_events = device.type == "cuda" and clock is None
        self._clock = clock or time.perf_counter_ns
        self._marks: list[tuple[Action | _Other | None, Any]] = []  # None: the innermost open span ends
        self._now: Callable[[], Any] = self._event if self._on_events else self._clock
        self.begin()

    def begin(self) -> None:
        """Begins a step and drops earlier records."""
        self._marks.clear()
        self._first = self._now()
        if self._on_events:
            torch.cuda.synchronize(self._device)
        self._first_ns = self._clock()  # the GPU has just passed the first event

    def began(self, action: Action) -> None:
        self._marks.append((action, self._now()))

    def ended(self, action: Action) -> None:
        self._marks.append((None, self._now()))

    @contextmanager
    def span(
        self, kind: SpanKind, stage: int | None = None, microbatch: int | None = None
    ) -> Generator[None]:
        """Records a span that is no action; it may lie within one."""
        self._marks.append((_Other(kind, stage, microbatch), self._now()))
        try:
            yield
        finally:
            self._marks.append((None, self._now()))

    def take(self) -> tuple[Span, ...]:
        """Ended spans since `begin`, by start, in seconds, with waits. Waits for the GPU's work."""
        start, times = self._seconds()
        found: list[Span | None] = []  # in order of their start; None: still open
        open_: list[tuple[int, Action | _Other, float]] = []  # with their index in `found`
        free = start  # when the rank became idle
        for (what, _), at in zip(self._marks, times, strict=True):
            if what is None:
                place, begun, since = open_.pop()
                found[place] = Span(
                    kind=begun.kind, start=since, stop=at, stage=begun.stage, microbatch=begun.microbatch
                )
                free = at
                continue
            if isinstance(what, Action) and at > free:
                wait = Span(kind="wait", start=free, stop=at, stage=what.stage, microbatch=what.microbatch)
                found.append(wait)
            open_.append((len(found), what, at))
            found.append(None)
        self._marks.clear()
        return tuple(span for span in found if span)

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self) -> tuple[float, Sequence[float]]:
        start = self._first_ns * 1e-9
        if not self._on_events:
            return start, [at * 1e-9 for _, at in self._marks]
        torch.cuda.synchronize(self._device)
        return start, [start + self._first.elapsed_time(at) * 1e-3 for _, at in self._marks]


def gather_timeline(
    group: Group,
    spans: Sequence[Span],
    *,
    step: int,
    place: MeshCoordinates,
    schedule: Callable[[int], Schedule],
) -> Timeline:
    """All ranks' step on rank 0's clock, on every rank. All ranks call this right after the step.

    group: all ranks, CPU tensors. spans: this rank's, in seconds of `time.perf_counter`. step: from 1. schedule: for so many
        microbatches.
    """
    offsets = clock_offsets(group)
    mine = {"place": asdict(place), "spans": [asdict(span) for span in spans]}
    everyone = collect(group, mine)
    rows = [
        TimelineRow(rank=rank, place=MeshCoordinates(**each["place"]), spans=tuple(_shifted(Span(**span), -offset.seconds) for span in each["spans"]))
        for rank, (each, offset) in enumerate(zip(everyone, offsets, strict=True))
    ]  # fmt: skip
    start = min((span.start for row in rows for span in row.actions), default=0.0)
    rows = [replace(row, spans=tuple(_shifted(span, -start) for span in row.spans)) for row in rows]
    error = sum(sorted(each.error_seconds for each in offsets)[-2:])  # of the two least certain
    microbatches = [span.microbatch for row in rows for span in row.actions]
    most = max((each + 1 for each in microbatches if each is not None), default=1)
    return Timeline(step=step, schedule=schedule(most), rows=tuple(rows), clock_error_seconds=error)


def _shifted(span: Span, seconds: float) -> Span:
    """The span on another clock, rounded to nanoseconds, the resolution of clocks."""
    return replace(span, start=round(span.start + seconds, 9), stop=round(span.stop + seconds, 9))
