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
from meshloom.core.job import Job
from meshloom.core.losses.in_precision import in_precision
from meshloom.core.losses.turns import check_turns, jobs_of
from meshloom.core.plan import Plan
from meshloom.core.units import format_bytes, format_count
from meshloom.launch.devices import check_ranks
from meshloom.launch.environment import opened_cache
from meshloom.machine.machine import Machine, load, machine_file
from meshloom.optimizer.bfloat16.lowered import lowered
from meshloom.planner.describe import check_weights, describe
from meshloom.planner.divided import divided
from meshloom.planner.memory.memory import Memory, in_turn
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
    check_turns(job, plan)
    check_ranks(plan.tp * plan.pp, "simulated", arguments.oversubscribe)
    given = load(Path(arguments.machine)) if arguments.machine else None
    known = [machine_file(device) for device in (["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"])]
    here = next((each for each in known if each.is_file()), None)
    machine = given or (load(here) if here else None)
    notes = check_weights(job)
    stream = sys.stderr if arguments.json == "-" else sys.stdout
    cache = opened_cache(arguments.cache)
    described: list[tuple[Readings, Memory | None]] = []
    for name, of_loss in jobs_of(lowered(in_precision(job, plan), plan)).items():
        if name:
            objective = job.losses[name]
            often = f"every {objective.every} steps" if objective.every > 1 else "every step"
            print(
                f"{chr(10) if described else ''}loss {name}: {format_count(objective.updates, 'update')} in {often}",
                file=stream,
            )
            records.write("loss", name=name, updates=objective.updates, every=objective.every)
        readings = Readings(of_loss, cache)
        with LongPhases(Console(file=stream)) as phases, phases.of(readings.timings):
            described.append((readings, _describe_one(readings, arguments, plan, machine, given, records)))
    memories = [memory for _, memory in described if memory is not None]
    if job.losses and len(memories) == len(described):
        whole = in_turn(memories, bucketed=False)
        print(
            f"\na step of all losses on one device: {format_bytes(whole.peak)} at the peak, of which {format_bytes(whole.parameters)} parameters and "
            f"{format_bytes(whole.optimizer)} optimizer state of all of them", file=stream,
        )  # fmt: skip
        records.write("losses", peak=whole.peak, parameters=whole.parameters, optimizer=whole.optimizer)
    print(*notes, sep="\n", end="\n" if notes else "", file=stream)
    for readings, _ in described if not arguments.timings else ():
        warnings = readings.stored.warnings if readings.stored else ()
        print(*warnings, sep="\n", end="\n" if warnings else "", file=stream)
    if arguments.timings:
        readings = described[0][0]
        seconds = {"start": started}
        for each, _ in described:
            for phase, taken in each.timings.seconds.items():
                seconds[phase] = seconds.get(phase, 0.0) + taken
        shown = ", ".join(f"{phase} {taken:.1f}" for phase, taken in seconds.items())
        total = f"{sum(seconds.values()):.1f} in all."
        print(f"\nCPU seconds: {shown}; {total}", *readings.timings.notes, file=stream)
        records.write("timings", plan=str(plan), seconds=seconds)
    return 0


def _describe_one(
    readings: Readings, arguments: argparse.Namespace, plan: Plan, machine: Machine | None, given: Machine | None, records: Records
) -> Memory | None:  # fmt: skip
    """A job of one loss; its memory on one device, if that is known. given: the machine that was asked for."""
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
    return description.memory
