"""How a plan shards a job's model over tp, found by shapes alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from meshloom.core.plan import Plan
from meshloom.machine.machine import Machine
from meshloom.planner.readings import Readings
from meshloom.program.cost.opaque_shares import check_divided
from meshloom.program.cost.rates import rates_of
from meshloom.tensor_parallel.division import stored_choice
from meshloom.tensor_parallel.explain import DivisionAccount, account_of
from meshloom.tensor_parallel.layout.layout import layout_of
from meshloom.tensor_parallel.partition import Partition, partition
from meshloom.tensor_parallel.rules.table import rules_with
from meshloom.tensor_parallel.search.choose import DivisionChoice, choose, rates_for


@dataclass(frozen=True, kw_only=True)
class Divided:
    """A model sharded over tp, and what every rank holds, computes and sends of it in a step.

    depends: all that it depends on besides the program, as the key under which results are stored. make:
    computes `part`, which is not needed where all results were stored.
    """

    account: DivisionAccount
    depends: Mapping[str, Any]
    make: Callable[[], Partition]

    @cached_property
    def part(self) -> Partition:
        """The partition over the ranks."""
        return self.make()


def divided(
    readings: Readings, plan: Plan, *, batch_size: int | None = None, machine: Machine | None = None
) -> Divided:
    """batch_size: of the global batch; default: the job's. machine: whose rates are used; default: the
    measurements of this one.

    Raises `CaptureError` if the loss cannot be captured, and `PlanError` if it cannot be sharded as the plan
    says.
    """
    job, timings, stored = readings.job, readings.timings, readings.stored
    reading = readings.of(plan.largest_share(batch_size or job.batch_size)[0])
    program = reading.program
    rates = (
        rates_of(machine, plan.tp)
        if machine is not None and machine.device == program.device.type
        else rates_for(program, plan.tp)
    )
    placements, memory_bytes = plan.tp_placements, plan.memory_bytes or None

    @cache
    def make() -> Partition:
        with timings.of("axes"):
            layout = layout_of(program, rules_with(job.rules))

        def choose_here() -> DivisionChoice:
            return choose(
                layout,
                plan.tp,
                rates,
                placements=placements,
                memory_bytes=memory_bytes,
                priced=reading.costs,
                told=timings.counted,
            )

        with timings.of("choosing a division"):
            choice = stored_choice(
                stored,
                layout,
                plan.tp,
                rates,
                choose_here,
                rules=job.rules,
                placements=placements,
                memory_bytes=memory_bytes,
            )
        with timings.of("dividing"):
            return partition(choice)

    def account() -> DivisionAccount:
        part = make()
        with timings.of("dividing"):
            return account_of(
                part, reading.costs, num_chunks=plan.microbatches, placements=placements, rates=rates.source
            )

    depends = {
        "ranks": plan.tp, "rates": rates, "rules": sorted(job.rules.items()), "placements": placements, "memory": memory_bytes, "chunks": plan.microbatches,
    }  # fmt: skip
    with timings.of("choosing a division"):
        found = stored.value("account", program, depends, DivisionAccount, account) if stored else account()
    if plan.pp == 1 and not found.parameters_divided:
        check_divided(
            plan,
            list(program.opaque),
            {name: math.prod(each.meta.shape) for name, each in program.parameters.items()},
        )
    return Divided(account=found, depends=depends, make=make)
