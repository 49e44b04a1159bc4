"""What updates a rank's parameters: the job's optimizers on what its exchange owns, or on masters of that."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from meshloom.comm.group import Group
from meshloom.comm.rank_context import RankContext
from meshloom.core.errors import JobError
from meshloom.core.job import Job, NamedParameters
from meshloom.core.plan import Plan
from meshloom.exchange.disjoint import parts_of
from meshloom.exchange.exchange import Exchange
from meshloom.exchange.sparse_gradients import SparseGradients
from meshloom.optimizer.averages import ParameterAverages
from meshloom.optimizer.bfloat16.master_values import MasterValues
from meshloom.optimizer.updater import Updater
from meshloom.optimizer.user_optimizer import UserOptimizers
from meshloom.parameters.shards import Shards


def open_updater(
    job: Job, plan: Plan, context: RankContext, exchange: Exchange, shards: Shards, *, made: UserOptimizers, whole: NamedParameters,
    local: NamedParameters, stages: Group | None, values: MasterValues | None, refused: Sequence[Collection[str]],
    scaled: bool,
) -> Updater:  # fmt: skip
    """The updater, of masters where `values` gives them. Raises `JobError` on all ranks.

    made, whole, local, stages, scaled: as of `Updater`, of the parameters themselves. refused: as of `MasterValues.open`.
    """
    offload = plan.offload == "optimizer"
    if values is None:
        updater = Updater(
            job,
            whole,
            exchange.ownership,
            shards,
            local,
            stages,
            made,
            context.device,
            offload,
            scaled=scaled,
        )
        if made.average is not None:
            if parts_of(exchange, SparseGradients):
                raise JobError(
                    "Averages are of parameters with dense gradients, and an embedding has sparse ones, of which only used rows are sent. "
                    "Use sparse=False, or leave ml.Averaged out."
                )
            updater.state.averages = ParameterAverages(made.average, exchange, shards)
        return updater
    masters = values.open(exchange.ownership, local, whole, shards, made, refused)
    updater = Updater(
        job,
        values.whole,
        masters.ownership,
        shards,
        masters.local,
        stages,
        made,
        context.device,
        offload,
        scaled=scaled,
    )
    updater.take_masters(masters)
    return updater
