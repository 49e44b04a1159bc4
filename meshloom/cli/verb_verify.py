"""`meshloom verify`: run a job under a plan and on one device, and compare."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from rich.console import Console

from meshloom.cli.plan_lines import plan_of
from meshloom.core.job import Job
from meshloom.launch.environment import is_first_rank
from meshloom.report.records import Records
from meshloom.report.reproduction import write_reproduction
from meshloom.report.terminal import LongPhases
from meshloom.report.verification_files import write_junit, write_page
from meshloom.report.written_file import check_directory
from meshloom.telemetry.timings import Timings
from meshloom.verify.findings import print_report
from meshloom.verify.run import verify


def verify_plan(arguments: argparse.Namespace, job: Job, records: Records) -> int:
    """Exit code: 0 if the plan equals one device."""
    dtype = {"float64": torch.float64, "float32": torch.float32, None: None}[arguments.dtype]
    for file in filter(None, (arguments.report, arguments.junit)):
        check_directory(Path(file))
    console, timings = Console(stderr=arguments.json == "-"), Timings(time.monotonic)
    with LongPhases(console) as phases, phases.of(timings) if is_first_rank() else nullcontext():
        report = verify(
            job, plan_of(arguments), devices=arguments.devices, steps=arguments.steps, dtype=dtype, timeout_seconds=arguments.timeout,
            transport=arguments.transport, oversubscribe=arguments.oversubscribe, overcommit=arguments.overcommit, blocks=arguments.blocks,
            against=torch.float64 if arguments.against else None, quick=arguments.quick, cache=arguments.cache, timings=timings,
        )  # fmt: skip
    if report is None:  # the process of another rank: rank 0 reports
        return 0
    print_report(report, console)
    command = shlex.join(["meshloom", *sys.argv[1:]])
    if arguments.report:
        write_page(report, Path(arguments.report), command)
    if arguments.junit:
        write_junit(report, Path(arguments.junit), f"verify {arguments.target}")
    if arguments.repro and not report.passed:
        write_reproduction(report, Path(arguments.repro), command)
    for record in report.records():
        records.write(**record)
    return 0 if report.passed else 1
