"""Opens a replica's engine under as much of the plan as the job allows: a loss that cannot be read runs whole.

    the loss is read                     each rank of a replica holds its shard of its stages
    it cannot be read                    each rank of a replica holds the whole model and computes the same
    an optimizer looks at everything     likewise along pp; without zero, if it evaluates the loss in its update

What a rank runs then is a plan with dp alone, in as many copies as a replica has ranks: nothing is sent between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from meshloom.comm.objects import on_rank_0, share
from meshloom.comm.rank_context import RankContext
from meshloom.comm.steps import Steps
from meshloom.core.errors import CaptureError, JobError, MeshloomError
from meshloom.core.job import Job, NamedParameters
from meshloom.core.losses.turns import OwnGradients
from meshloom.core.plan import DEFAULTS, Plan
from meshloom.core.random import generators, preserved_draws
from meshloom.exchange.units.find_units import units_of
from meshloom.exchange.units.unit_slices import UnitParameters
from meshloom.optimizer.user_optimizer import UserOptimizers, make_optimizers, takes_closure
from meshloom.parameters.model import trainable
from meshloom.parameters.sparse_parameters import make_dense
from meshloom.parameters.starting_model import StartingModel
from meshloom.parameters.value_reads import ValueReads
from meshloom.program.capture.outside import ChangedWhileReadError
from meshloom.program.ir.lines import WAY_OUT
from meshloom.program.store.program_cache import ProgramCache
from meshloom.replica import step_checks
from meshloom.replica.chunk_scope import ChunkScope
from meshloom.replica.engine import Engine
from meshloom.replica.module_engine import ModuleEngine
from meshloom.replica.program_engine import ProgramEngine
from meshloom.telemetry.timings import Timings

MOST_SHOWN = 400  # characters of why a loss cannot be read: torch's own errors are long


@dataclass(frozen=True, kw_only=True)
class OpenedEngine:
    """plan: what the rank's parts run under; without tp and pp where the loss runs whole. units: of the full model, where
    ranks hold different parts of it. notes: for the user, before the first step. made: the optimizers, where they had to be made
    to open it, of the whole parameters and without their values or draws."""

    engine: Engine
    scope: ChunkScope
    plan: Plan
    units: Sequence[UnitParameters] = ()
    notes: Sequence[str] = ()
    made: UserOptimizers | None = None


def open_engine(
    job: Job, plan: Plan, context: RankContext, start: StartingModel, own: OwnGradients | None, *, dtype: torch.dtype | None, timings: Timings,
    stored: ProgramCache | None, updates: bool,
) -> Steps[OpenedEngine]:  # fmt: skip
    """Opens the engine of one rank. Arguments as of `Replica`. Collective; raises `CaptureError` on all ranks for a loss that
    cannot be read under a plan that asks for more than its division (recomputation, placements, cuts)."""
    asked, notes, made = plan, list[str](), MadeOptimizers()
    if updates:
        plan, notes = yield from _for_optimizers(job, plan, context, start, made)
    model, unread = start.model, ""
    if plan.captures:
        units = units_of(job, plan, model) if plan.zero == 3 else []
        scope = ChunkScope(job, plan, context, model, dtype=dtype)
        made_dense = make_dense(model)  # programs' gradients are
        engine = ProgramEngine(job, plan, context, dtype=dtype, timings=timings, stored=stored)
        opened = _read(engine, plan, scope, start, own)
        unread = yield from _why_unread(opened, context) if updates else opened
        if not unread:
            return OpenedEngine(
                engine=engine, scope=scope, plan=plan, units=units, notes=notes, made=made.optimizers
            )
        if not (updates and may_run_whole(plan)):
            raise refusal(plan, unread)
        for each in made_dense:
            each.sparse = True
        notes.append(unread_note(plan, unread))
    whole = undivided(plan)
    scope = ChunkScope(job, whole, context, model, dtype=dtype)
    engine = ModuleEngine(job, whole, context, asked, updates=updates)
    yield from engine.open(model, scope, start.unfilled, own)
    return OpenedEngine(engine=engine, scope=scope, plan=whole, notes=notes, made=made.optimizers)


def undivided(plan: Plan) -> Plan:
    """What each rank of a replica runs where nothing is divided over tp and pp.

    >>> undivided(Plan(dp=2, pp=2, tp=2, microbatches=3, schedule="gpipe"))
    Plan('dp=2,microbatches=3')
    """
    of_division = ("tp", "pp", "schedule", "virtual_stages", "cuts", "tp_placements")
    return replace(plan, **{name: DEFAULTS[name] for name in of_division})


def may_run_whole(plan: Plan) -> bool:
    """Whether a plan's loss may run whole: nothing is asked for that only a program has, besides its division."""
    return (plan.tp > 1 or plan.pp > 1) and not _of_programs(plan)


def refusal(plan: Plan, unread: str) -> CaptureError:
    """For a plan that asks for what only a program has, and a loss that has none. unread: why."""
    asked = _of_programs(plan)
    if not asked:
        return CaptureError(unread)
    setting, what = asked[0]
    then = (
        "the loss runs whole on every rank of a replica"
        if plan.tp > 1 or plan.pp > 1
        else "the module runs as it is"
    )
    return CaptureError(
        f"{setting} {what}, and this loss cannot be read. Without it {then}. What cannot be read: {unread}"
    )


def _of_programs(plan: Plan) -> list[tuple[str, str]]:
    """Settings of a plan that mean nothing without a program, each with what it asks for."""
    settings = [
        ("recompute", plan.recompute != "none", "runs operators of the loss a second time, which is right for known ones alone"),
        ("tp_placements", bool(plan.tp_placements), "says how operators of the loss are sharded"),
        ("cuts", bool(plan.cuts), "says between which modules the loss is cut"),
    ]  # fmt: skip
    return [(name, what) for name, is_asked, what in settings if is_asked]


def _read(
    engine: ProgramEngine, plan: Plan, scope: ChunkScope, start: StartingModel, own: OwnGradients | None
) -> Steps[str]:
    step_checks.check_readable(start.model, plan)
    yield from engine.open(start.model, scope, start.unfilled, own)
    return ""


def _why_unread(opened: Steps[str], context: RankContext) -> Steps[str]:
    """Opens a program's engine; returns why the loss cannot be read, "" if it can. Other errors are raised, and so is that of
    a loss that changes what it reads, which copies of it on several ranks would do several times."""
    try:
        return (yield from opened)
    except (
        MeshloomError
    ) as error:  # the same one on all ranks, on others than the first perhaps as another kind
        raised = error
    is_unread = isinstance(raised, CaptureError) and not isinstance(raised, ChangedWhileReadError)
    why: str = yield from share(context.world, str(raised) if is_unread else "")
    if not why:
        raise raised
    return why


def unread_note(plan: Plan, why: str) -> str:
    """Of a plan whose loss cannot be read, which runs whole then. why: as an error says it."""
    why = why.removesuffix(WAY_OUT).strip().removesuffix(".")
    why = why if len(why) <= MOST_SHOWN else f"{why[:MOST_SHOWN]}..."
    return (
        f"The loss cannot be read, so it runs as written, whole, on every rank of a replica: {_axes(plan)} nothing of it, neither parameters nor work. "
        f"Use dp instead, or change what cannot be read: {why}."
    )


def _axes(plan: Plan) -> str:
    """
    >>> _axes(Plan(pp=2, tp=2)), _axes(Plan(tp=2)), _axes(Plan())
    ('tp=2 and pp=2 divide', 'tp=2 divides', 'tp and pp divide')
    """
    axes = [f"{name}={getattr(plan, name)}" for name in ("tp", "pp") if getattr(plan, name) > 1]
    axes = axes or ["tp", "pp"]
    return f"{' and '.join(axes)} divide{'s' if len(axes) == 1 else ''}"


@dataclass
class MadeOptimizers:
    """What a rank that makes the optimizers early need not make again."""

    optimizers: UserOptimizers | None = None


def _for_optimizers(
    job: Job, plan: Plan, context: RankContext, start: StartingModel, made: MadeOptimizers
) -> Steps[tuple[Plan, list[str]]]:
    """The plan without what leaves no rank the parameters that an optimizer looks at together; notes for the user."""
    if plan.pp == 1 and not plan.zero:
        return plan, []
    look = partial(looks_at_all, job, trainable(start.model), start.unfilled is not None, made)
    found: Sequence[str] = yield from share(
        context.world, (yield from on_rank_0(context.world, look, JobError))
    )
    return plan_for_optimizers(job, plan, found)


def plan_for_optimizers(job: Job, plan: Plan, found: Sequence[str]) -> tuple[Plan, list[str]]:
    """The plan without what leaves no rank the parameters that an optimizer looks at together; notes for the user. found: as of `looks_at_all`."""
    if not found or (plan.pp == 1 and not plan.zero):
        return plan, []
    kind, takes_closures = found[0], len(found) > 1
    notes: list[str] = []
    if plan.zero and takes_closures:
        notes.append(
            f"{kind} evaluates the loss in its update and looks at all parameters at once, so every rank keeps all of them: zero={plan.zero} divides nothing."
        )
        plan = replace(plan, zero=0, zero_within=0)
    if plan.pp > 1 and may_run_whole(plan):
        notes.append(
            f"{kind} looks at all parameters at once, and with pp={plan.pp} no rank has them all, so the loss runs whole on every rank of a replica: "
            f"{_axes(plan)} neither parameters nor work. Use dp instead, or Job(elementwise=True) if it updates each parameter by itself."
        )
        plan = undivided(plan)
    return plan, notes


def looks_at_all(
    job: Job, named: NamedParameters, is_unfilled: bool = True, kept: MadeOptimizers | None = None
) -> list[str]:
    """The kind of an optimizer that looks at all parameters at once, and, if one takes a closure, that word; []: there is none.
    is_unfilled: whether the parameters have no values yet. kept: gets the optimizers if their function would do the same once they have."""
    with preserved_draws(), ValueReads((each for _, each in named), refused=is_unfilled) as reads:
        before = _generators()
        try:
            made = make_optimizers(job, named)
            is_repeatable = not reads.found and _generators() == before
            found = [
                each
                for each, reach in zip(made.optimizers, made.reaches, strict=True)
                if reach == "optimizer"
            ]
        except Exception:  # whatever it is, the run meets it again
            return []
    if kept is not None and is_repeatable:
        kept.optimizers = made
    kinds = [type(each).__name__ for each in found]
    return [*kinds[:1], *(["closure"] if any(map(takes_closure, found)) else [])]


def _generators() -> tuple[object, ...]:
    """The states of what Python and torch draw from, to be compared."""
    of_torch, of_python, of_numpy = generators()
    return of_torch.numpy().tobytes(), of_python, repr(of_numpy)
