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
from meshloom.core.units import format_bytes
from meshloom.launch.devices import check_ranks
from meshloom.launch.environment import opened_cache
from meshloom.machine.machine import load, machine_file
from meshloom.planner.describe import check_weights, describe
from meshloom.planner.divided import divided
from meshloom.planner.ranks import copied_by, has_shares, shares_of
from meshloom.planner.readings import Readings
from meshloom.planner.staged_plan import staged
from meshloom.report.description import description_records, print_description
from meshloom.report.records import Records
from meshloom.report.stages import lines_of, lines_of_ranks, stages_record
from meshloom.tensor_parallel.explain import text_of


def describe_job(arguments: argparse.Namespace, job: Job, records: Records) -> int:
    """Exit code 0."""
    started = time.process_time()  # Python, PyTorch, and the job's file
    plan = plan_of(arguments)
    plan.check_batch(arguments.batch or job.batch_size)
    check_ranks(plan.tp * plan.pp, "simulated", arguments.oversubscribe)
    given = load(Path(arguments.machine)) if arguments.machine else None
    known = [machine_file(device) for device in (["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"])]
    here = next((each for each in known if each.is_file()), None)
    notes = check_weights(job)
    readings = Readings(job, opened_cache(arguments.cache))
    description = describe(
        readings, batch_size=arguments.batch, machine=given or (load(here) if here else None)
    )
    stream = sys.stderr if arguments.json == "-" else sys.stdout
    print_description(
        description, Console(file=stream, width=None if stream.isatty() else LOG_WIDTH), arguments.depth
    )
    for record in description_records(description, arguments.depth):
        records.write(**record)
    division = divided(readings, plan, batch_size=arguments.batch, machine=given) if plan.tp > 1 else None
    stages = staged(readings, plan, batch_size=arguments.batch, machine=given) if plan.pp > 1 else None
    if division:
        print(f"\n{text_of(division.account)}", file=stream)
        records.write("division", plan=str(plan), **asdict(division.account))
    if stages:
        print("", *lines_of(stages), sep="\n", file=stream)
        records.write("stages", **stages_record(stages))
    if plan.mesh.size > 1 and has_shares(plan):
        factor = description.optimizer_factor
        shares = shares_of(
            readings, plan, division, stages, batch_size=arguments.batch, optimizer_factor=factor
        )
        print("", *lines_of_ranks(shares), sep="\n", file=stream)
        records.write("ranks", plan=str(plan), ranks=[asdict(each) for each in shares])
        if job.checkpoint == "background":
            copied = max(copied_by(each.held, plan) for each in shares)
            print(
                f"and copies up to {format_bytes(copied)} of it to host memory for each checkpoint in the background",
                file=stream,
            )
    print(*notes, sep="\n", end="\n" if notes else "", file=stream)
    if readings.stored and not arguments.timings:
        print(*readings.stored.warnings, sep="\n", end="\n" if readings.stored.warnings else "", file=stream)
    if arguments.timings:
        seconds = {"start": started, **readings.timings.seconds}
        shown = ", ".join(f"{phase} {taken:.1f}" for phase, taken in seconds.items())
        total = f"{sum(seconds.values()):.1f} in all."
        print(f"\nCPU seconds: {shown}; {total}", *readings.timings.notes, file=stream)
        records.write("timings", plan=str(plan), seconds=seconds)
    return 0
