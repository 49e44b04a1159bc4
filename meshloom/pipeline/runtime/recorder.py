"""Notes when a rank's actions begin and end, and what else takes time in a step; cheap enough to do while it
happens.

    recorder.begin()                      0F0      0F1   recompute 0B0
    PipelineRun(...).run(recorder)   |....[###]....[###]..[##======]      .... wait: made of the gaps when the notes are read
    with recorder.span("update")

A note costs a fraction of a microsecond on the CPU. On a GPU, where a call returns before its work is done, a
note is an event in the stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from meshloom.pipeline.schedules.schedule import Action
from meshloom.pipeline.schedules.spans import Span, SpanKind


@dataclass(frozen=True)
class _Other:
    """What a span is that is no action."""

    kind: SpanKind
    stage: int | None
    microbatch: int | None


class Recorder:
    """A listener of `PipelineRun.run`.

    device: on which the rank computes. clock: nanoseconds of another clock than `time.perf_counter_ns`, which
        is then also that of the spans.
    """

    def __init__(self, device: torch.device, clock: Callable[[], int] | None = None) -> None:
        self._device = device
        self._on_events = device.type == "cuda" and clock is None
        self._clock = clock or time.perf_counter_ns
        self._marks: list[tuple[Action | _Other | None, Any]] = []  # None: the innermost that has begun ends
        self._now: Callable[[], Any] = self._event if self._on_events else self._clock
        self.begin()

    def begin(self) -> None:
        """A step begins; forget what was noted before."""
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
        """Around what is no action of its own; it may lie within one."""
        self._marks.append((_Other(kind, stage, microbatch), self._now()))
        try:
            yield
        finally:
            self._marks.append((None, self._now()))

    def take(self) -> tuple[Span, ...]:
        """All since `begin`, in order of their start, in seconds of the clock; waits among them. What has not
        ended is left out.

        On a GPU it waits until the work is done.
        """
        start, times = self._seconds()
        found: list[Span | None] = []  # in the order of their beginning; None: it has not ended
        open_: list[tuple[int, Action | _Other, float]] = []  # and their places in `found`
        free = start  # since when the rank has had nothing to do
        for (what, _), at in zip(self._marks, times, strict=True):
            if what is None:
                place, begun, since = open_.pop()
                found[place] = Span(
                    kind=begun.kind, start=since, stop=at, stage=begun.stage, microbatch=begun.microbatch
                )
                free = at
                continue
            if isinstance(what, Action) and at > free:
                found.append(
                    Span(kind="wait", start=free, stop=at, stage=what.stage, microbatch=what.microbatch)
                )
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
