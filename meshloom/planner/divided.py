"""How a plan would divide a job's model over tp, found by shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

from meshloom.cluster import Machine
from meshloom.graph.choose import Choice, choose, rates_for
from meshloom.graph.chosen import Account, account_of
from meshloom.graph.layout import layout_of
from meshloom.graph.partition import Partition, partition
from meshloom.graph.rates import rates_of
from meshloom.graph.rules.table import rules_with
from meshloom.graph.stored_choices import divided_before
from meshloom.plan import Plan
from meshloom.planner.readings import Readings


@dataclass(frozen=True, kw_only=True)
class Divided:
    """A model divided over tp, and what every rank holds, computes and sends of it in a step."""

    part: Partition
    account: Account


def divided(readings: Readings, plan: Plan, *, batch_size: int | None = None, machine: Machine | None = None) -> Divided:
    """batch_size: of the global batch; default: the job's. machine: whose rates count; default: what was measured on this one.

    Raises `CaptureError` if the loss cannot be read, and `PlanError` if it cannot be divided as the plan asks.
    """
    job = readings.job
    reading = readings.of(plan.largest_share(batch_size or job.batch_size)[0])
    program, priced = reading.program, reading.costs
    timings = readings.timings
    with timings.of("axes"):
        layout = layout_of(program, rules_with(job.rules))
    rates = rates_of(machine, plan.tp) if machine is not None and machine.device == program.device.type else rates_for(layout, plan.tp)
    with timings.of("choosing a division"):
        placements, memory_bytes = plan.tp_placements, plan.memory_bytes or None

        def choose_here() -> Choice:
            return choose(layout, plan.tp, rates, placements=placements, memory_bytes=memory_bytes, priced=priced)

        choice = divided_before(
            readings.stored, layout, plan.tp, rates, choose_here, rules=job.rules, placements=placements, memory_bytes=memory_bytes
        )
    with timings.of("dividing"):
        part = partition(choice)
        account = account_of(part, priced, num_chunks=plan.microbatches, placements=plan.tp_placements, rates=rates.source)
    return Divided(part=part, account=account)
