"""A step's timeline, gathered from what the recorders of all ranks noted, on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from meshloom.comm.group import Group
from meshloom.comm.network.clocks import clock_offsets
from meshloom.comm.objects import collect
from meshloom.comm.steps import Steps
from meshloom.core.mesh import MeshCoordinates
from meshloom.pipeline.schedules.schedule import Schedule
from meshloom.pipeline.schedules.spans import Span
from meshloom.telemetry.timeline import Timeline, TimelineRow


def gather_timeline(
    group: Group, spans: Sequence[Span], *, step: int, place: MeshCoordinates, schedule: Schedule
) -> Steps[Timeline]:
    """A step of all ranks on rank 0's clock, on every rank; all of them call it right after the step.

    group: all ranks, CPU tensors. spans: this rank's, in seconds of `time.perf_counter`. step: counted from
        1.
    """
    offsets = yield from clock_offsets(group)
    mine = {"place": asdict(place), "spans": [asdict(span) for span in spans]}
    everyone = yield from collect(group, mine)
    rows = [
        TimelineRow(rank=rank, place=MeshCoordinates(**each["place"]), spans=tuple(_shifted(Span(**span), -offset.seconds) for span in each["spans"]))
        for rank, (each, offset) in enumerate(zip(everyone, offsets, strict=True))
    ]  # fmt: skip
    start = min((span.start for row in rows for span in row.actions), default=0.0)
    rows = [replace(row, spans=tuple(_shifted(span, -start) for span in row.spans)) for row in rows]
    error = sum(sorted(each.error_seconds for each in offsets)[-2:])  # of the two that are known least
    return Timeline(step=step, schedule=schedule, rows=tuple(rows), clock_error_seconds=error)


def _shifted(span: Span, seconds: float) -> Span:
    """Rounded to nanoseconds, which is what clocks give."""
    return replace(span, start=round(span.start + seconds, 9), stop=round(span.stop + seconds, 9))
