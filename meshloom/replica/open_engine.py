"""Opens the engine of one rank: programs of the loss where the plan needs some, else the user's module as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from meshloom.comm.rank_context import RankContext
from meshloom.core.job import Job
from meshloom.core.losses.turns import OwnGradients
from meshloom.core.plan import Plan
from meshloom.exchange.units.find_units import units_of
from meshloom.exchange.units.unit_slices import UnitParameters
from meshloom.optimizer.user_optimizer import UserOptimizers, reach_in_words, takes_closure
from meshloom.parameters.sparse_parameters import make_dense
from meshloom.parameters.starting_model import StartingModel
from meshloom.program.store.program_cache import ProgramCache
from meshloom.replica import step_checks
from meshloom.replica.chunk_scope import ChunkScope
from meshloom.replica.engine import Engine
from meshloom.replica.module_stages import ModuleStages
from meshloom.replica.program_stages import ProgramStages
from meshloom.replica.stages import Stages
from meshloom.telemetry.timings import Timings


@dataclass(frozen=True, kw_only=True)
class OpenedEngine:
    """units: of the full model, where ranks hold different parts of it."""

    engine: Engine
    scope: ChunkScope
    units: Sequence[UnitParameters] = ()


def open_engine(
    job: Job, plan: Plan, context: RankContext, start: StartingModel, own: OwnGradients | None, *, dtype: torch.dtype | None, timings: Timings,
    stored: ProgramCache | None, updates: bool,
) -> OpenedEngine:  # fmt: skip
    """Opens the engine of one rank. Arguments as of `Replica`. Collective; raises `CaptureError` on all ranks for a loss that
    cannot be captured under a plan that needs its program."""
    model, units = start.model, list[UnitParameters]()
    stages: Stages
    if plan.captures:
        step_checks.check_readable(model, plan)
        units = units_of(job, plan, model) if plan.zero == 3 else units
        make_dense(model)  # programs' gradients are
        stages = ProgramStages(job, plan, context, dtype=dtype, timings=timings, stored=stored)
    else:
        stages = ModuleStages(job, plan, context, updates=updates)
    engine, scope = Engine(plan, context, stages, timings), ChunkScope(job, plan, context, model, dtype=dtype)
    engine.open(model, scope, start.unfilled, own)
    return OpenedEngine(engine=engine, scope=scope, units=units)


def for_optimizers(plan: Plan, made: UserOptimizers) -> tuple[Plan, list[str]]:
    """The plan that ranks run, which is without zero where an optimizer evaluates the loss in its update; notes for the user."""
    kind = next((type(each).__name__ for each in made.optimizers if takes_closure(each)), "")
    if plan.zero and kind:
        note = (
            f"{kind} evaluates the loss in its update and looks at all parameters at once, so every rank keeps all of them: "
            f"zero={plan.zero} divides nothing."
        )
        return replace(plan, zero=0, zero_within=0), [note]
    optimizer = made.looks_at_all
    if optimizer is None or (plan.tp == 1 and not plan.zero):
        return plan, []
    why, instead = reach_in_words(optimizer)
    return plan, [f"{why}: every rank gathers them.{instead}"]
