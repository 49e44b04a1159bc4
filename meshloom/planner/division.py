"""How a plan with tp would divide a job's model, told before it runs and by shapes alone."""

from __future__ import annotations

from meshloom.errors import PlanError
from meshloom.graph.choose import choose
from meshloom.graph.chosen import Account, account_of
from meshloom.graph.cost import costs
from meshloom.graph.layout import layout_of
from meshloom.graph.partition import partition
from meshloom.graph.rates import Rates
from meshloom.graph.rules.table import rules_with
from meshloom.graph.shapes import capture_shapes
from meshloom.job import Job
from meshloom.plan import Plan, chunk_sizes
from meshloom.state.samples import first_batches


def division_of(job: Job, plan: Plan, *, batch_size: int | None = None, rates: Rates | None = None) -> Account:
    """What `plan` divides, what stays whole and why, and what a rank sends in a step, for the largest chunk of a batch.

    batch_size: samples of the global batch; default: the job's. Raises `PlanError` for a plan without tp, and where pins cannot work.
    """
    if plan.tp == 1:
        raise PlanError(f"The plan {plan} divides no model. Give tp=2 or more.")
    size = chunk_sizes(batch_size or job.batch_size, plan.num_chunks)[0]
    (batch,) = first_batches(job, 1, size)
    program = capture_shapes(job, batch)
    choice = choose(layout_of(program, rules_with(job.rules)), plan.tp, rates, placements=plan.tp_placements)
    return account_of(partition(choice), costs(program), num_chunks=plan.microbatches, placements=plan.tp_placements)
