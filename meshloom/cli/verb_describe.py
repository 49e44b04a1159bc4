"""`meshloom describe`: the parts of a job's model and the costs of a step."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from meshloom.cli.plan_lines import LOG_WIDTH, plan_of
from meshloom.core.exchange_refusals import check_exchange
from meshloom.core.job import Job
from meshloom.core.losses.in_precision import in_precision
from meshloom.core.plan import Plan
from meshloom.launch.devices import check_ranks
from meshloom.launch.environment import opened_cache
from meshloom.machine.machine import Machine, load, machine_file
from meshloom.optimizer.bfloat16.lowered import lowered
from meshloom.planner.describe import check_weights, describe
from meshloom.planner.divided import divided
from meshloom.planner.ranks import ranks_of, sends_buckets, shares_one_copy
from meshloom.planner.readings import Readings
from meshloom.planner.staged_plan import staged
from meshloom.report.description import description_records, print_description
from meshloom.report.records import Records
from meshloom.report.stages import lines_of, lines_of_ranks, stages_record
from meshloom.report.terminal import LongPhases
from meshloom.tensor_parallel.explain import text_of

ONE_COPY = (
    "parameters and optimizer state: one copy for the {} replicas of a host, of which a rank is counted its share; "
    "with --transport gloo every replica has its own"
)


def describe_job(arguments: argparse.Namespace, job: Job, records: Records) -> int:
    """Exit code 0."""
    started = time.process_time()  # Python, PyTorch, and the job's file
    plan = plan_of(arguments)
    plan.check_batch(arguments.batch or job.batch_size)
    check_exchange(job, plan)
    check_ranks(plan.tp * plan.pp, "simulated", arguments.oversubscribe)
    given = load(Path(arguments.machine)) if arguments.machine else None
    known = [machine_file(device) for device in (["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"])]
    here = next((each for each in known if each.is_file()), None)
    machine = given or (load(here) if here else None)
    notes = check_weights(job)
    stream = sys.stderr if arguments.json == "-" else sys.stdout
    cache = opened_cache(arguments.cache)
    readings = Readings(lowered(in_precision(job, plan), plan), cache)
    with LongPhases(Console(file=stream)) as phases, phases.of(readings.timings):
        _describe(readings, arguments, plan, machine, given, records)
    print(*notes, sep="\n", end="\n" if notes else "", file=stream)
    if not arguments.timings:
        warnings = readings.stored.warnings if readings.stored else ()
        print(*warnings, sep="\n", end="\n" if warnings else "", file=stream)
    else:
        seconds = {"start": started, **readings.timings.seconds}
        shown = ", ".join(f"{phase} {taken:.1f}" for phase, taken in seconds.items())
        total = f"{sum(seconds.values()):.1f} in all."
        print(f"\nCPU seconds: {shown}; {total}", *readings.timings.notes, file=stream)
        records.write("timings", plan=str(plan), seconds=seconds)
    return 0


def _describe(
    readings: Readings, arguments: argparse.Namespace, plan: Plan, machine: Machine | None, given: Machine | None, records: Records
) -> None:  # fmt: skip
    """given: the machine that was asked for."""
    description = describe(readings, batch_size=arguments.batch, machine=machine)
    stream = sys.stderr if arguments.json == "-" else sys.stdout
    print_description(
        description, Console(file=stream, width=None if stream.isatty() else LOG_WIDTH), arguments.depth
    )
    for record in description_records(description, arguments.depth):
        records.write(**record)
    asked = plan
    plan, notes = readings.runs(plan)
    if notes:
        print("", *notes, sep="\n", file=stream)
    division = divided(readings, plan, batch_size=arguments.batch, machine=given) if plan.tp > 1 else None
    stages = staged(readings, plan, batch_size=arguments.batch, machine=given) if plan.pp > 1 else None
    if division:
        print(f"\n{text_of(division.account)}", file=stream)
        records.write("division", plan=str(plan), **asdict(division.account))
    if stages:
        print("", *lines_of(stages), sep="\n", file=stream)
        records.write("stages", **stages_record(stages))
    if asked != Plan() and plan.synchronous:
        one_copy = shares_one_copy(asked, arguments.transport) and not readings.gathered
        shares, memories = ranks_of(
            readings, plan, division, stages, batch_size=arguments.batch, one_copy=one_copy
        )
        print("", *lines_of_ranks(shares, memories, sent=sends_buckets(plan)), sep="\n", file=stream)
        if one_copy:
            print(ONE_COPY.format(plan.dp), file=stream)
        ranks = [
            {**asdict(share), "memory": memory.kinds(), "phases": dict(memory.phases), "peak": memory.peak}
            for share, memory in zip(shares, memories, strict=True)
        ]
        records.write("ranks", plan=str(asked), one_copy=one_copy, ranks=ranks)
