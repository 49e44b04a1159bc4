"""The stages that a plan splits a job's model into, found by shapes alone, and settings that would be
better."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from meshloom.core.errors import PlanError
from meshloom.core.plan import Plan
from meshloom.core.schedules import SCHEDULES
from meshloom.machine.machine import Machine
from meshloom.pipeline.schedules.check import held_by_stage
from meshloom.pipeline.schedules.found import NAME as FOUND
from meshloom.pipeline.schedules.schedule import Schedule
from meshloom.pipeline.stages.choose_cuts import CutChoice
from meshloom.pipeline.stages.intervals import Intervals
from meshloom.pipeline.stages.plan_cuts import (
    choose_stages,
    line_of_plan,
    schedule_of,
    stage_times,
    stored_cuts,
)
from meshloom.pipeline.stages.simulate import Simulated, simulate
from meshloom.pipeline.stages.stage_traffic import StageTraffic, traffic_of_stages
from meshloom.pipeline.stages.stages import Crossing, Stage, cut_into_stages, users_of
from meshloom.planner.readings import Readings
from meshloom.program.cost.rates import Rates, rates_here, rates_of

WORTH = 0.03  # of the time: smaller gains are not mentioned


@dataclass(frozen=True, kw_only=True)
class Better:
    """Another plan. gain: 0.1 where a step takes 10 % less time."""

    setting: str
    seconds: float
    idle_share: float
    rank_bytes: int
    gain: float


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """The stages of a replica under a plan, and a step of it, without the exchange along dp and the
    optimizer.

    choice: stages with their costs for a microbatch of the largest size. sizes: [microbatch], samples.
    in_flight: [stage], the largest number of microbatches whose activations it holds. traffic: between
    stages, in a step, without what stays on a rank. source: where the rates are from. measured: whether they
    were measured, on the target machine.
    """

    plan: Plan
    schedule: Schedule
    choice: CutChoice
    sizes: tuple[int, ...]
    in_flight: tuple[int, ...]
    simulated: Simulated
    traffic: tuple[StageTraffic, ...]
    source: str
    measured: bool
    better: tuple[Better, ...] = ()


def staged(
    readings: Readings,
    plan: Plan,
    *,
    batch_size: int | None = None,
    machine: Machine | None = None,
    offers: bool = True,
) -> StagePlan:
    """The stages of a plan with pp. batch_size: of the global batch; default: the job's. machine: whose rates
    are used; default: this one's.

    offers: also find better settings, for which more plans are tried.

    Numbers are those of stages before they are sharded over tp. Raises `CaptureError` if the loss cannot be
    captured, and `PlanError` if it cannot be split as the plan says.
    """
    reader = _Reader(readings, batch_size or readings.job.batch_size, machine)
    with readings.timings.of("cutting"):
        found = reader.stage_plan(plan, with_traffic=True)
    if not offers:
        return found
    with readings.timings.of("other settings"):
        return replace(found, better=tuple(_better(found, reader)))


def stage_plan(
    plan: Plan,
    schedule: Schedule,
    choice: CutChoice,
    microbatches: Sequence[Iterable[Crossing]],
    sizes: Sequence[int],
    rates: Rates,
) -> StagePlan:
    """The plan of stages that were chosen. microbatches: of each, the values that cross stages. sizes: their
    samples; the first has as many as `choice` is for."""
    relative = [size / sizes[0] for size in sizes]
    sent = traffic_of_stages(microbatches)
    in_flight = tuple(
        max(moment[stage] for moment in held_by_stage(schedule)) for stage in range(schedule.num_stages)
    )
    if plan.schedule == FOUND:  # the cuts were chosen by what 1f1b holds
        held = zip(choice.stages, in_flight, strict=True)
        rank_bytes = tuple(each.state_bytes + each.kept_bytes * most for each, most in held)
        choice = replace(choice, rank_bytes=rank_bytes)
    return StagePlan(
        plan=plan,
        schedule=schedule,
        choice=choice,
        sizes=tuple(sizes),
        in_flight=in_flight,
        simulated=simulate(schedule, choice.stages, rates.message_seconds, sizes=relative),
        traffic=tuple(
            each for each in sent if schedule.ranks[each.source] != schedule.ranks[each.destination]
        ),
        source=rates.source,
        measured=rates.machine is not None,
    )


class _Reader:
    """Stages of a job's programs under several plans."""

    def __init__(self, readings: Readings, batch_size: int, machine: Machine | None) -> None:
        self.batch_size = batch_size
        self._readings = readings
        self._machine = machine
        # size, what is recomputed -> by rates
        self._lines: dict[tuple[int, str], list[tuple[Rates, Intervals]]] = {}

    def stage_plan(self, plan: Plan, *, with_traffic: bool) -> StagePlan:
        sizes = plan.largest_share(self.batch_size)
        program = self._readings.of(sizes[0]).program
        device = program.device.type
        if self._machine is not None and self._machine.device == device:
            rates = rates_of(self._machine, plan.pp)
        else:
            rates = rates_here(device, plan.pp)
        choice = self._choose(plan, sizes, sizes[0], rates)
        crossings: dict[int, list[Crossing]] = {}
        if with_traffic:
            stages = cut_into_stages(program, choice.stage_of, plan.num_stages)
            crossings[sizes[0]] = _crossings(stages)
            for size in set(sizes[1:]) - {sizes[0]}:
                other = self._choose(plan, sizes, size, rates, users_of(stages))
                crossings[size] = _crossings(
                    cut_into_stages(self._readings.of(size).program, other.stage_of, plan.num_stages)
                )
        schedule = schedule_of(plan, len(sizes), stage_times(plan, choice.stages, rates, sizes))
        return stage_plan(plan, schedule, choice, [crossings.get(size, []) for size in sizes], sizes, rates)

    def _choose(
        self,
        plan: Plan,
        sizes: Sequence[int],
        size: int,
        rates: Rates,
        ownership: dict[str, tuple[int, ...]] | None = None,
    ) -> CutChoice:
        reading = self._readings.of(size)
        stored = self._readings.stored if ownership is None and size == sizes[0] else None

        def choice() -> CutChoice:
            return choose_stages(
                reading.program,
                reading.costs,
                plan,
                rates,
                sizes,
                ownership,
                self._line(plan, size, rates),
                told=self._readings.timings.counted,
            )

        return stored_cuts(stored, reading.program, rates, choice, plan=plan, sizes=sizes)

    def _line(self, plan: Plan, size: int, rates: Rates) -> Intervals:
        for other, line in self._lines.setdefault((size, plan.recompute), []):
            if other == rates:
                return line
        reading = self._readings.of(size)
        line = line_of_plan(reading.program, reading.costs, plan, rates)
        self._lines[size, plan.recompute].append((rates, line))
        return line


def _crossings(stages: Sequence[Stage]) -> list[Crossing]:
    return [each for stage in stages for each in stage.incoming]


def _better(found: StagePlan, reader: _Reader) -> Iterable[Better]:
    """The best plan with other microbatches, with another schedule and with another number of stages each, if
    its step is shorter; more ranks only if all of them together take less time."""
    plan, now = found.plan, found.simulated.seconds
    microbatches = [
        replace(plan, microbatches=m)
        for m in (plan.microbatches // 2, 2 * plan.microbatches, 4 * plan.microbatches)
        if m > 0 and plan.dp * m <= reader.batch_size
    ]
    per_rank = {name: entry.stages_per_rank for name, entry in SCHEDULES.items()}
    as_many = {name for name, number in per_rank.items() if number == per_rank[plan.schedule]}
    kept = as_many if not plan.virtual_stages else set[str]()  # with the same cuts
    schedules = [
        replace(plan, schedule=name, virtual_stages=0, cuts=plan.cuts if name in kept else ())
        for name in per_rank
        if name != plan.schedule
    ]
    numbers = [replace(plan, pp=pp, cuts=()) for pp in (plan.pp - 1, plan.pp + 1) if pp > 1]
    for setting, plans in (("microbatches", microbatches), ("schedule", schedules), ("pp", numbers)):
        offers: list[Better] = []
        for other in plans:
            try:
                tried = reader.stage_plan(other, with_traffic=False)
            except PlanError:  # it does not fit, or there are too few places to split
                continue
            seconds, more = tried.simulated.seconds, max(1.0, other.pp / plan.pp)
            if seconds * more < now * (1 - WORTH):
                offer = Better(
                    setting=f"{setting}={getattr(other, setting)}", seconds=seconds, idle_share=tried.simulated.idle_share,
                    rank_bytes=max(tried.choice.rank_bytes), gain=1 - seconds / now,
                )  # fmt: skip
                offers.append(offer)
        yield from sorted(offers, key=lambda each: each.seconds)[:1]
