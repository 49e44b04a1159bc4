"""A timeline: what every rank did in one step, and when. Measured and predicted ones are the same type."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any

from meshloom.core.errors import PlanError, ReportError
from meshloom.core.mesh import MeshCoordinates
from meshloom.pipeline.schedules.check import check_schedule
from meshloom.pipeline.schedules.schedule import Action, Schedule
from meshloom.pipeline.schedules.spans import Span
from meshloom.pipeline.schedules.timing import Durations, run_on_paper


@dataclass(frozen=True, kw_only=True)
class TimelineRow:
    """One rank. spans: in order of their start."""

    rank: int
    place: MeshCoordinates
    spans: tuple[Span, ...]

    @cached_property
    def actions(self) -> tuple[Span, ...]:
        """The spans of the schedule's actions, in which the rank is busy."""
        return tuple(span for span in self.spans if span.action)

    @property
    def busy_seconds(self) -> float:
        """Seconds spent in actions."""
        return sum(span.seconds for span in self.actions)

    @property
    def name(self) -> str:
        """The rank and its place."""
        return f"rank {self.rank} ({self.place})"


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step of all ranks. Times are seconds since the first forward of any rank began; earlier ones are
    negative.

    step: counted from 1; on paper 0. schedule: of the pipeline with most microbatches. A pipeline is the ranks that
        differ in pp only; one that has fewer, or none, has an order of its own.
    clock_error_seconds: by how much the clocks of two ranks may be apart.
    """

    step: int
    schedule: Schedule
    rows: tuple[TimelineRow, ...]
    clock_error_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.rows:
            raise ReportError("A timeline has a row for every rank, and this one has none.")
        for row in self.rows:
            if row.place.pp >= self.schedule.num_ranks:
                raise ReportError(
                    f"{row.name} has no part in schedule {self.schedule.name} over {self.schedule.num_ranks} ranks."
                )
        for row in self.rows:
            done = self.pipelines.get(_pipeline(row))
            if done is None or done.num_microbatches != self.schedule.num_microbatches:
                continue
            found, expected = done.actions[row.place.pp], self.schedule.actions[row.place.pp]
            if found != expected:
                pairs = enumerate(zip_longest(found, expected))
                place, (one, due) = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
                raise ReportError(
                    f"Action {place} of {row.name} is {one or 'nothing'}, and schedule {self.schedule.name} has {due or 'nothing'} there."
                )
        for pipeline, done in self.pipelines.items():
            try:
                check_schedule(done)
            except PlanError as error:
                raise ReportError(f"Pipeline dp={pipeline[0]},tp={pipeline[1]}: {error}") from None

    @cached_property
    def pipelines(self) -> dict[tuple[int, int], Schedule]:
        """(dp, tp) of a pipeline -> what its ranks did, as a schedule; without those that did nothing."""
        found: dict[tuple[int, int], Schedule] = {}
        for pipeline in map(_pipeline, self.rows):
            rows = {row.place.pp: row for row in self.rows if _pipeline(row) == pipeline}
            actions = tuple(
                tuple(each.action for each in rows[place].actions if each.action) if place in rows else ()
                for place in range(self.schedule.num_ranks)
            )
            count = max((each.microbatch + 1 for row in actions for each in row), default=0)
            if count:
                found[pipeline] = replace(self.schedule, num_microbatches=count, actions=actions)
        return found

    @cached_property
    def windows(self) -> dict[tuple[int, int], tuple[float, float]]:
        """(dp, tp) of a pipeline -> the start of its first action and the end of its last one; 0 and 0 where it has none."""
        found: dict[tuple[int, int], tuple[float, float]] = {}
        for row in self.rows:
            if not row.actions:
                continue
            start, stop = found.get(_pipeline(row), (float("inf"), float("-inf")))
            found[_pipeline(row)] = min(start, row.actions[0].start), max(stop, row.actions[-1].stop)
        return dict.fromkeys(map(_pipeline, self.rows), (0.0, 0.0)) | found

    @property
    def seconds(self) -> float:
        """From the first action's start to the last one's end, of the slowest pipeline."""
        return max(stop - start for start, stop in self.windows.values())

    @property
    def start(self) -> float:
        """When the first action of any rank starts."""
        return min(start for start, _ in self.windows.values())

    @property
    def stop(self) -> float:
        """When the last span of any rank ends."""
        return max(span.stop for row in self.rows for span in row.spans)

    def idle_seconds(self, row: TimelineRow) -> float:
        """How long a rank is in no action between the first forward's start and the last backward's end in
        its pipeline."""
        start, stop = self.windows[_pipeline(row)]
        return max(0.0, stop - start - row.busy_seconds)

    def idle_share(self, row: TimelineRow) -> float:
        """The same as a share of that time."""
        start, stop = self.windows[_pipeline(row)]
        return self.idle_seconds(row) / (stop - start) if stop > start else 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON values; a span is [kind, stage, microbatch, start, stop]."""
        ranks = [
            {"rank": row.rank, "place": asdict(row.place), "spans": [[each.kind, each.stage, each.microbatch, each.start, each.stop] for each in row.spans]}
            for row in self.rows
        ]  # fmt: skip
        error = self.clock_error_seconds
        return {
            "step": self.step,
            "schedule": str(self.schedule),
            "clock_error_seconds": error,
            "ranks": ranks,
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Timeline:
        """The inverse of `to_dict`. Raises `ReportError` for anything else."""
        try:
            rows: list[TimelineRow] = []
            for each in values["ranks"]:
                spans = tuple(span_from_list(span) for span in each["spans"])
                place = MeshCoordinates(**each["place"])
                rows.append(TimelineRow(rank=each["rank"], place=place, spans=spans))
            schedule, error = Schedule.parse(values["schedule"]), values["clock_error_seconds"]
            return Timeline(
                step=values["step"], schedule=schedule, rows=tuple(rows), clock_error_seconds=error
            )
        except (KeyError, TypeError, ValueError, AttributeError, PlanError) as error:
            raise ReportError(
                f"It holds no timeline as meshloom writes it ({type(error).__name__}: {error})."
            ) from None


def span_from_list(values: list[Any]) -> Span:
    """[kind, stage, microbatch, start, stop]."""
    kind, stage, microbatch, start, stop = values
    return Span(kind=kind, stage=stage, microbatch=microbatch, start=start, stop=stop)


def on_paper(schedule: Schedule, seconds: Callable[[Action], float]) -> Timeline:
    """The predicted timeline of a step: nothing is executed, and messages take no time. seconds: of an action."""
    timed = run_on_paper(schedule, seconds)
    rows = [
        TimelineRow(rank=rank, place=MeshCoordinates(pp=rank), spans=tuple(_span(action, timed.starts[action], timed.ends[action]) for action in actions))
        for rank, actions in enumerate(schedule.actions)
    ]  # fmt: skip
    return Timeline(step=0, schedule=schedule, rows=tuple(rows))


@dataclass(frozen=True, kw_only=True)
class Idle:
    """Of the time from the first forward's start to the last backward's end, the share that a rank is idle.

    measured: as the timeline has it.
    formula: with forwards and halves of backwards of one unit each on all stages, and messages that take no
    time: (p - 1) / (m + p - 1) for gpipe and 1f1b. own_seconds: the schedule on paper with what each stage's
        actions took on average, and messages that take no time.

    own_seconds - formula is what uneven stages cost (and uneven halves of backwards); measured - own_seconds
    messages, uneven microbatches, and what else runs.
    """

    measured: float
    formula: float
    own_seconds: float


def idle_of(timeline: Timeline) -> list[Idle]:
    """[row]."""
    equal = on_paper(timeline.schedule, Durations.uniform(timeline.schedule.num_stages).of)
    own = {
        pipeline: on_paper(done, _mean_seconds(timeline, pipeline))
        for pipeline, done in timeline.pipelines.items()
    }

    def share(paper: Timeline | None, row: TimelineRow) -> float:
        return paper.idle_share(paper.rows[row.place.pp]) if paper else 0.0

    return [
        Idle(measured=timeline.idle_share(row), formula=share(equal, row), own_seconds=share(own.get(_pipeline(row)), row)) for row in timeline.rows
    ]  # fmt: skip


def _mean_seconds(timeline: Timeline, pipeline: tuple[int, int]) -> Callable[[Action], float]:
    """The mean seconds of an action, by stage and kind."""
    took: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for row in timeline.rows:
        if _pipeline(row) == pipeline:
            for span in row.actions:
                took[span.stage or 0, span.kind].append(span.seconds)
    means = {key: statistics.fmean(seconds) for key, seconds in took.items()}
    return lambda action: means[action.stage, action.kind]


def _pipeline(row: TimelineRow) -> tuple[int, int]:
    return row.place.dp, row.place.tp


def _span(action: Action, start: float, stop: float) -> Span:
    return Span(kind=action.kind, stage=action.stage, microbatch=action.microbatch, start=start, stop=stop)
