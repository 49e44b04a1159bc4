"""`meshloom verify`: run a job under a plan and on one device, and compare."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch
from rich.console import Console

from meshloom.cli.plan_lines import plan_of
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.launch.environment import is_first_rank, is_rank, launched_devices
from meshloom.launch.failure import report_stop
from meshloom.report.records import Records
from meshloom.report.reproduction import write_reproduction
from meshloom.report.terminal import LongPhases
from meshloom.report.verification_files import write_junit, write_page
from meshloom.report.written_file import check_directory
from meshloom.telemetry.timings import Timings
from meshloom.verify.apart.process import ReferenceProcess
from meshloom.verify.comparison_run import compare_here
from meshloom.verify.findings import print_report
from meshloom.verify.run import check_promised, verify
from meshloom.verify.verified_run import Compare


def verify_plan(arguments: argparse.Namespace, job: Job, records: Records) -> int:
    """Exit code: 0 if the plan equals one device."""
    dtype = {"float64": torch.float64, "float32": torch.float32, None: None}[arguments.dtype]
    for file in filter(None, (arguments.report, arguments.junit)):
        check_directory(Path(file))
    plan, timings = plan_of(arguments), Timings(time.monotonic)
    console = Console(stderr=arguments.json == "-")
    check_promised(plan)
    with (
        ExitStack() as around,
        LongPhases(console) as phases,
        phases.of(timings) if is_first_rank() else nullcontext(),
    ):
        compare: Compare = compare_here
        if is_rank() and is_first_rank() and _computes_on_cpus(plan, arguments.devices):
            compare = around.enter_context(ReferenceProcess(arguments.command)).compare
        report = verify(
            job, plan, devices=arguments.devices, steps=arguments.steps, dtype=dtype, timeout_seconds=arguments.timeout,
            transport=arguments.transport, oversubscribe=arguments.oversubscribe, overcommit=arguments.overcommit, blocks=arguments.blocks,
            against=torch.float64 if arguments.against else None, quick=arguments.quick, cache=arguments.cache, timings=timings, compare=compare,
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
    if report.passed:
        return 0
    report_stop(f"The plan {plan} differs from one device: see the report.", 1, main=False)
    return 1


def _computes_on_cpus(plan: Plan, devices: str) -> bool:
    """Whether ranks do. On GPUs one device is rank 0's, in whose memory another process would be, too."""
    chosen = launched_devices(devices)
    on_gpus = chosen == "auto" and plan.mesh.size <= torch.cuda.device_count()
    return not on_gpus and chosen in ("auto", "cpu")
