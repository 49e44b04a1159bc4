"""The stages of a program under a plan: the inputs of `choose_cuts.py` that follow from the plan's schedule,
memory limit and recomputation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshloom.core.errors import PlanError
from meshloom.core.plan import Plan
from meshloom.pipeline.schedules.builders import make_schedule
from meshloom.pipeline.schedules.check import held_by_stage
from meshloom.pipeline.schedules.found import NAME as FOUND
from meshloom.pipeline.schedules.found import find_schedule, limits_of_1f1b
from meshloom.pipeline.schedules.schedule import Schedule
from meshloom.pipeline.schedules.timing import Durations
from meshloom.pipeline.stages.choose_cuts import CutChoice, choose_cuts, line_of, where_used
from meshloom.pipeline.stages.intervals import Intervals, StageCost
from meshloom.pipeline.stages.simulate import durations_of, step_seconds
from meshloom.program.cost.cost import Cost, SavedTensor
from meshloom.program.cost.program_seconds import with_seconds_of_recomputation, work_of
from meshloom.program.cost.rates import Rates
from meshloom.program.ir.program import Program
from meshloom.program.recompute.recompute import recomputed
from meshloom.program.store.program_cache import ProgramCache


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """What schedule=found goes by: the stages of the first program that trains.

    durations: with sizes, where microbatches of a full batch differ. limits: as of `find_schedule`.
    """

    durations: Durations
    limits: Sequence[int]


def schedule_of(plan: Plan, num_microbatches: int, times: StageTimes | None = None) -> Schedule:
    """The plan's schedule for `num_microbatches`. times: as `stage_times` gives them; None: not known yet, and
    schedule=found is 1f1b, by which its stages are cut."""
    if times is None:
        return make_schedule(plan.schedule, plan.pp, num_microbatches, plan.num_stages // plan.pp)
    durations = times.durations
    if len(durations.sizes) != num_microbatches:  # not a full batch
        durations = replace(durations, sizes=())
    return find_schedule(plan.pp, num_microbatches, durations, times.limits)


def stage_times(
    plan: Plan, stages: Sequence[StageCost], rates: Rates, sizes: Sequence[int]
) -> StageTimes | None:
    """What the plan's schedule is searched by; None: it is not schedule=found, or there are no costs.

    Ranks hold as many activations as under 1f1b; with memory_bytes as many as there is room for, less one, which
    is left to what a rank holds besides.
    """
    if plan.schedule != FOUND or not stages:
        return None
    limits = limits_of_1f1b(plan.pp)
    if plan.memory_bytes:
        room = [plan.memory_bytes * plan.tp - each.state_bytes for each in stages]
        fits = [left // max(each.kept_bytes, 1) - 1 for left, each in zip(room, stages, strict=True)]
        limits = [max(most, min(fit, 2 * plan.pp)) for most, fit in zip(limits, fits, strict=True)]
    return StageTimes(durations=durations_of(stages, rates.message_seconds, sizes), limits=limits)


def choose_stages(
    program: Program,
    priced: Mapping[str, Cost],
    plan: Plan,
    rates: Rates,
    sizes: Sequence[int],
    holders: Mapping[str, Collection[int]] | None = None,
    line: Intervals | None = None,
    pinned: Collection[str] = (),
    told: Callable[[int, int], None] = lambda done, of: None,
) -> CutChoice:
    """The stages of a full program under `plan`. priced: node -> its cost. sizes: [microbatch], samples of
    one replica's, largest first.

    line: `line_of_plan`, if known.
    holders: parameter or buffer -> the stages that hold it since the job's first program was cut. Then
        nothing else counts, and a stage may be empty. Raises `PlanError` as `choose_cuts` does.
    pinned: as for `computed_from_batch`. told: as of `choose_cuts`.
    """
    schedule = schedule_of(plan, len(sizes))
    price = step_seconds(schedule, rates.message_seconds, sizes=[each / sizes[0] for each in sizes])
    line = line or line_of_plan(program, priced, plan, rates, pinned)
    try:
        return choose_cuts(
            program,
            priced,
            plan.num_stages,
            rates,
            cuts=() if holders else plan.cuts,
            memory_bytes=None if holders else float(plan.memory_bytes * plan.tp) or None,
            in_flight=held_by_stage(schedule),
            ranks=schedule.ranks,
            holders=holders,
            line=line,
            step_seconds=None if holders else price,
            told=told,
        )
    except PlanError:
        stage_of = _followed(program, holders, schedule_of(plan, 1).ranks) if holders else None
        if stage_of is None:
            raise
        return CutChoice(stage_of=stage_of, stages=(), rank_bytes=())


def line_of_plan(
    program: Program, priced: Mapping[str, Cost], plan: Plan, rates: Rates, pinned: Collection[str] = ()
) -> Intervals:
    """The cost of operators as stages under the plan's recomputation, whatever its stages and schedule."""
    work, kept = work_of(program, priced, rates), {name: each.kept for name, each in priced.items()}
    if plan.recompute != "none":
        recomputation = recomputed(program, priced, plan.recompute, rates)
        work = with_seconds_of_recomputation(work, recomputation.seconds_of)
        kept = {
            name: (SavedTensor(memory=name, num_bytes=size),) for name, size in recomputation.kept_of.items()
        }
    return line_of(program, work, kept, rates, pinned)


def _followed(
    program: Program, holders: Mapping[str, Collection[int]], ranks: Sequence[int]
) -> dict[str, int] | None:
    """Puts every operator into the first stage, from that of the operator before it on, that may hold its
    parameters; None: there is none.

    In evaluation there is less to compute: a stage that only had dropout in training is empty.
    """
    variables = (*program.parameters.items(), *program.buffers.items())
    held = where_used(program, holders, ranks)
    stages_of = {each.value: held[name] for name, each in variables if name in held}
    found: dict[str, int] = {}
    now = 0
    for node in program.nodes:
        wanted = [stages_of[ref.name] for ref in node.operands() if ref.name in stages_of]
        while now < len(ranks) and not all(now in each for each in wanted):
            now += 1
        if now == len(ranks):
            return None
        found[node.name] = now
    return found


def stored_cuts(
    stored: ProgramCache | None,
    program: Program,
    rates: Rates,
    choose: Callable[[], CutChoice],
    *,
    plan: Any,
    sizes: Sequence[int],
) -> CutChoice:
    """The cuts that an earlier run stored for an equal program, plan and rates, or those of `choose`,
    which are then stored. plan, sizes: what they depend on besides."""
    if stored is None:
        return choose()
    parts = {"plan": str(plan), "rates": rates, "sizes": tuple(sizes)}
    known = stored.choice("cut", program, parts)
    if known is not None:
        try:
            numbers = dict(zip((node.name for node in program.nodes), known["stage_of"], strict=True))
            stages = tuple(StageCost(**each) for each in known["stages"])
            return CutChoice(stage_of=numbers, stages=stages, rank_bytes=tuple(known["rank_bytes"]))
        except (ValueError, KeyError, TypeError):
            pass
    choice = choose()
    found = {
        "stage_of": [choice.stage_of[node.name] for node in program.nodes],
        "stages": [asdict(each) for each in choice.stages],
        "rank_bytes": choice.rank_bytes,
    }
    stored.keep_choice("cut", program, parts, found)
    return choice
