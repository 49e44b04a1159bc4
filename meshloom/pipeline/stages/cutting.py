"""Where a plan cuts a program into stages: what `pipeline/stages/cut.py` decides by, as the plan's schedule,
limit and recomputation have it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from meshloom.core.errors import PlanError
from meshloom.core.plan import Plan
from meshloom.pipeline.schedules.builders import make_schedule
from meshloom.pipeline.schedules.check import held_by_stage
from meshloom.pipeline.schedules.schedule import Schedule
from meshloom.pipeline.stages.cut import CutChoice, choose_cuts, line_of, where_used
from meshloom.pipeline.stages.intervals import Intervals
from meshloom.pipeline.stages.simulate import step_seconds
from meshloom.program.cost.cost import Cost, SavedTensor
from meshloom.program.cost.operator_seconds import computed_again, work_of
from meshloom.program.cost.rates import Rates
from meshloom.program.ir.program import Program
from meshloom.program.recompute.recompute import recomputed


def schedule_of(plan: Plan, num_microbatches: int) -> Schedule:
    """The plan's schedule, for so many microbatches."""
    return make_schedule(plan.schedule, plan.pp, num_microbatches, plan.num_stages // plan.pp)


def choose_stages(
    program: Program,
    priced: Mapping[str, Cost],
    plan: Plan,
    rates: Rates,
    sizes: Sequence[int],
    homes: Mapping[str, Collection[int]] | None = None,
    line: Intervals | None = None,
) -> CutChoice:
    """The stages of a whole program under `plan`. priced: node -> its cost. sizes: [microbatch], samples of
    one replica's, the largest first.

    line: `line_of_plan`, if that is known.
    homes: parameter or buffer -> the stages that hold it since a first program of the job was cut; then
        nothing but these counts, and a stage may be left without anything to do. Raises `PlanError` as
        `choose_cuts`.
    """
    try:
        return _choose(
            program, priced, plan, rates, sizes, homes, line or line_of_plan(program, priced, plan, rates)
        )
    except PlanError:
        stage_of = _followed(program, homes, schedule_of(plan, 1).ranks) if homes else None
        if stage_of is None:
            raise
        return CutChoice(stage_of=stage_of, stages=(), rank_bytes=())


def line_of_plan(program: Program, priced: Mapping[str, Cost], plan: Plan, rates: Rates) -> Intervals:
    """What operators cost as stages, as the plan recomputes them; alike for plans that differ in stages and
    schedules only."""
    work, kept = work_of(program, priced, rates), {name: each.kept for name, each in priced.items()}
    if plan.recompute != "none":
        again = recomputed(program, priced, plan.recompute, rates)
        work = computed_again(work, again.seconds_of)
        kept = {name: (SavedTensor(memory=name, num_bytes=size),) for name, size in again.kept_of.items()}
    return line_of(program, work, kept, rates)


def _choose(
    program: Program,
    priced: Mapping[str, Cost],
    plan: Plan,
    rates: Rates,
    sizes: Sequence[int],
    homes: Mapping[str, Collection[int]] | None,
    line: Intervals,
) -> CutChoice:
    schedule = schedule_of(plan, len(sizes))
    price = step_seconds(schedule, rates.message_seconds, sizes=[each / sizes[0] for each in sizes])
    return choose_cuts(
        program,
        priced,
        plan.num_stages,
        rates,
        cuts=() if homes else plan.cuts,
        memory_bytes=None if homes else float(plan.memory_bytes * plan.tp) or None,
        in_flight=held_by_stage(schedule),
        ranks=schedule.ranks,
        homes=homes,
        line=line,
        step_seconds=None if homes else price,
    )


def _followed(
    program: Program, homes: Mapping[str, Collection[int]], ranks: Sequence[int]
) -> dict[str, int] | None:
    """Every operator in the first stage, from that of the one before it on, that may use what it uses; None
    if there is none.

    In evaluation there is less to compute than in training, where a stage may have had dropout and nothing
    else.
    """
    names = {
        each.value: name
        for variables in (program.parameters, program.buffers)
        for name, each in variables.items()
    }
    held = where_used(program, homes, ranks)
    found: dict[str, int] = {}
    now = 0
    for node in program.nodes:
        wanted = [
            held[names[ref.name]] for ref in node.operands() if ref.name in names and names[ref.name] in held
        ]
        while now < len(ranks) and not all(now in each for each in wanted):
            now += 1
        if now == len(ranks):
            return None
        found[node.name] = now
    return found
