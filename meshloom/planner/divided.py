"""How a plan would divide a job's model over tp, found by shapes alone."""

from __future__ import annotations

from meshloom.cluster import Machine
from meshloom.graph.choose import choose, rates_for
from meshloom.graph.chosen import Account, account_of
from meshloom.graph.cost import costs
from meshloom.graph.layout import layout_of
from meshloom.graph.partition import partition
from meshloom.graph.rates import rates_of
from meshloom.graph.rules.table import rules_with
from meshloom.graph.shapes import capture_shapes
from meshloom.job import Job
from meshloom.plan import Plan
from meshloom.state.samples import first_batches


def divided(job: Job, plan: Plan, *, batch_size: int | None = None, machine: Machine | None = None) -> Account:
    """What every rank along tp would hold, compute and send in a step. batch_size: of the global batch; default: the job's.

    machine: whose rates count; default: what was measured on this one.

    Raises `CaptureError` if the loss cannot be read, and `PlanError` if it cannot be divided as the plan asks.
    """
    (batch,) = first_batches(job, 1, plan.largest_share(batch_size or job.batch_size)[0])
    program = capture_shapes(job, batch)
    priced = costs(program)
    layout = layout_of(program, rules_with(job.rules))
    rates = rates_of(machine, plan.tp) if machine is not None and machine.device == program.device.type else rates_for(layout, plan.tp)
    choice = choose(layout, plan.tp, rates, placements=plan.tp_placements, memory_bytes=plan.memory_bytes or None, priced=priced)
    return account_of(partition(choice), priced, num_chunks=plan.microbatches, placements=plan.tp_placements, rates=rates.source)
