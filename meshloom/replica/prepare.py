"""Sets a rank's step up, from top to bottom.

describe    all ranks compare the job and the shapes of its model; values, where every rank has all of them
capture     one rank captures the loss, divides and cuts it, and the others receive that; dp captures nothing
keep        each rank lets go of what it does not hold
optimizer   is made on named parameters of full shape, and gets what this rank owns of them in the exchange
values      of what this rank holds
connect     hooks, and what attaches itself to a step
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from meshloom.checkpoint.resuming import check_together
from meshloom.comm.objects import agree
from meshloom.core.job import NamedParameters
from meshloom.core.losses.logged import with_logs
from meshloom.exchange.exchange import Exchange
from meshloom.exchange.registry import Setup
from meshloom.exchange.units.find_units import find_units, held_units
from meshloom.exchange.units.unit_slices import UnitParameters
from meshloom.optimizer.bfloat16.master_values import master_values
from meshloom.optimizer.bfloat16.opening import open_updater
from meshloom.optimizer.user_optimizer import (
    UserOptimizers,
    for_optimizers,
    make_optimizers,
    make_without_values,
)
from meshloom.parameters.file_weights import agree_on_weights
from meshloom.parameters.model import facts
from meshloom.parameters.sparse_parameters import make_dense, sparse_parameters, sparse_tables
from meshloom.program.ir.written_parameters import frozen_parameters, limited_tables
from meshloom.replica import step_checks
from meshloom.replica.attach import attach
from meshloom.replica.chunk_scope import ChunkScope
from meshloom.replica.engine import Engine
from meshloom.replica.exchanges.opening import open_exchange
from meshloom.replica.exchanges.sharing import why_separate
from meshloom.replica.loss_stages import Stages
from meshloom.replica.module_stages import ModuleStages
from meshloom.replica.program_stages import ProgramStages
from meshloom.replica.replica import Replica

Units = Sequence[UnitParameters]


def prepare(replica: Replica) -> None:
    """Builds the parts of a step, with the other ranks. Raises the same error on all of them."""
    job, plan, context, model, start = (
        replica.job,
        replica.plan,
        replica.context,
        replica.model,
        replica.start,
    )
    timings, whole, tables = replica.timings, replica.named, sparse_tables(replica.model)
    with timings.of("copying values"):  # includes waiting for ranks that build more slowly
        agree(context.world, facts(job, plan, model))
        weights = agree_on_weights(job, model, context.world) if job.weights is not None else None
        stages = _stages_of(replica)
        replica.copied += start.settle(weights, fixed=stages.fixes_attributes)
        if stages.fixes_attributes:
            make_dense(model)  # programs' gradients are
    engine = replica.engine = Engine(plan, context, stages, timings)
    units = find_units(model, chosen=job.units, large_bytes=plan.bucket_bytes) if plan.zero == 3 else ()
    replica.scope = ChunkScope(job, plan, context, model, dtype=replica.dtype)
    engine.open(model, replica.scope, start.unfilled)
    if weights:
        with timings.of("reading weights"):
            filled = start.unfilled is not None  # as this rank's share was
            fill = partial(weights.fill, model, engine.shards)
            check_together(context.world, (lambda: None) if filled else fill)
    replica.told += weights.notes if weights and replica.dtype is None else ()
    replica.named, frozen = engine.parameters, frozen_parameters(model)
    with timings.of("optimizer and buffers"):
        values = master_values(context, start, start.exact) if start.exact else None
        made: UserOptimizers | None = None
        if replica.updates:
            made = (values or start).given(
                whole, partial(make_optimizers, job), partial(make_without_values, job)
            )
            replica.inner, notes = for_optimizers(replica.inner, made)
            replica.told += notes

        def open_one() -> None:
            replica.exchange = _exchange_of(replica, made, whole, frozen, tables, units)

        check_together(context.world, open_one)
        if made:
            replica.updater = open_updater(
                job, replica.inner, context, replica.exchange, engine.shards, made=made, whole=whole, local=replica.named,
                stages=replica.stage_group, values=values, refused=[tables, limited_tables(model)], scaled=replica.sums.scale is not None,
            )  # fmt: skip
            replica.undo.callback(replica.updater.close)
            check_together(context.world, lambda: replica.updater.open(replica.files))
    with timings.of("building the model"):
        start.finish()
    if replica.updates and plan.mesh.size > 1:
        replica.sums.rates = replica.updater.learning_rates
    replica.undo.enter_context(engine.connect(replica.exchange))
    attach(replica, frozen)


def _stages_of(replica: Replica) -> Stages:
    """Programs of the loss where the plan needs some, else the user's module as it is."""
    job, plan, context = replica.job, replica.plan, replica.context
    if not plan.divides_loss:
        return ModuleStages(job, plan, context, updates=replica.updates)
    step_checks.check_readable(replica.model)
    return ProgramStages(
        with_logs(job), plan, context, dtype=replica.dtype, timings=replica.timings, stored=replica.stored
    )


def _exchange_of(
    replica: Replica,
    made: UserOptimizers | None,
    whole: NamedParameters,
    frozen: NamedParameters,
    tables: Collection[str],
    units: Units,
) -> Exchange:
    """whole: all trainable parameters, as the model was built with them. frozen: what nothing trains. tables: with sparse gradients, as written. units: of the full
    model under zero=3."""
    engine, plan, context, named = replica.engine, replica.inner, replica.context, replica.named
    if made is None:
        return Setup(plan=plan, named=named, group=replica.replicas, unfilled=replica.start.unfilled).open()
    sparse = sparse_parameters(tables, whole, made.optimizers)
    rows = {name: len(each) for name, each in whole if name in sparse.names}
    engine.stages.watch_rows(rows, context.device)
    here = sparse.names.intersection(name for name, _ in named)
    setup = Setup(
        plan=plan, named=named, frozen=frozen, group=replica.replicas, replicated=engine.replicated,
        late=engine.late, lent=engine.lent, windows=replica.windows,
        may_share=lambda: replica.share and not here and not engine.stages.writes_trained and not why_separate(made, named),
        units=lambda: held_units(units, replica.model),
        unfilled=replica.start.unfilled, slices=context.slices, control=context.readers,
        sparse=here, kept=sparse.kept, sparse_only=sparse.sparse_only, used_rows=engine.stages.used_rows,
    )  # fmt: skip
    return open_exchange(setup)
