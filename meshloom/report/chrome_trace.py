"""A timeline as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

The Trace Event Format: complete events (`"ph": "X"`) with `ts` and `dur` in microseconds. A process is a
rank; its track 0 shows its actions, its track 1 its waits. Arrows (`"s"` to `"f"`) go from an action to the
one on another rank that could not start before it ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshloom.pipeline.schedules.check import needs
from meshloom.pipeline.schedules.schedule import Action
from meshloom.pipeline.schedules.spans import Span
from meshloom.telemetry.timeline import Timeline, TimelineRow

DOING, WAITING = 0, 1  # tracks of a rank
WHAT = {
    "F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights",
    "recompute": "recompute", "wait": "wait", "exchange": "exchange", "update": "update",
}  # fmt: skip


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The whole trace, as JSON values."""
    start = min(span.start for row in timeline.rows for span in row.spans)  # time begins at 0
    events: list[dict[str, Any]] = []
    for row in timeline.rows:
        events += _about(row)
        events += [_box(row, span, start) for span in row.spans]
    events += _arrows(timeline, start)
    error = _microseconds(timeline.clock_error_seconds)
    about = {"step": timeline.step, "schedule": str(timeline.schedule), "clock_error_microseconds": error}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _about(row: TimelineRow) -> list[dict[str, Any]]:
    facts = [
        (DOING, "process_name", {"name": row.name}),
        (DOING, "process_sort_index", {"sort_index": row.rank}),
        (DOING, "thread_name", {"name": "does"}),
        (WAITING, "thread_name", {"name": "waits"}),
    ]
    return [
        {"ph": "M", "name": name, "pid": row.rank, "tid": track, "args": values}
        for track, name, values in facts
    ]


def _box(row: TimelineRow, span: Span, start: float) -> dict[str, Any]:
    known = {"stage": span.stage, "microbatch": span.microbatch}
    return {
        "ph": "X", "name": span.name, "cat": WHAT[span.kind], "pid": row.rank, "tid": WAITING if span.kind == "wait" else DOING,
        "ts": _microseconds(span.start - start), "dur": _microseconds(span.seconds), "args": {key: value for key, value in known.items() if value is not None},
    }  # fmt: skip


def _arrows(timeline: Timeline, start: float) -> Iterator[dict[str, Any]]:
    """Arrows between neighbouring stages of one pipeline. An arrow's end belongs to the box that encloses its
    time."""
    number = 0
    for pipeline, schedule in timeline.pipelines.items():
        rows = [row for row in timeline.rows if (row.place.dp, row.place.tp) == pipeline]
        boxes: dict[Action, tuple[TimelineRow, Span]] = {
            span.action: (row, span) for row in rows for span in row.actions if span.action
        }
        for action, (row, span) in boxes.items():
            for earlier in needs(action, schedule):
                source, before = boxes[earlier]
                if source is not row:
                    number += 1
                    arrow = {
                        "name": f"{earlier}>{action.stage}",
                        "cat": "message",
                        "id": number,
                        "tid": DOING,
                    }
                    sent = _microseconds(before.stop - before.seconds / 1000 - start)
                    yield {**arrow, "ph": "s", "pid": source.rank, "ts": sent}
                    arrived = _microseconds(span.start - start)
                    yield {**arrow, "ph": "f", "bp": "e", "pid": row.rank, "ts": arrived}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
