"""`meshloom verify`: run a job under a plan and on one device, and compare."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from meshloom.cli.plan_lines import plan_of
from meshloom.core.errors import DeviceError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.launch.environment import is_first_rank, is_rank, launched_devices
from meshloom.launch.failure import report_stop
from meshloom.report.records import Records
from meshloom.report.reproduction import write_reproduction
from meshloom.report.terminal import LongPhases
from meshloom.report.verification_files import write_page
from meshloom.report.written_file import check_directory
from meshloom.telemetry.timings import Timings
from meshloom.verify.apart import ReferenceProcess
from meshloom.verify.comparison_run import compare_here
from meshloom.verify.findings import Report, print_report, whole_sentence
from meshloom.verify.run import check_promised, verify
from meshloom.verify.smaller_plans import smallest_plan
from meshloom.verify.verified_run import Compare

_SOON = 60.0  # seconds of a verification, after which smaller plans are not verified by themselves


def verify_plan(arguments: argparse.Namespace, job: Job, records: Records) -> int:
    """Exit code: 0 if the plan equals one device; with `--whole-batch` if that also equals one device on the whole batch."""
    dtype = {"float64": torch.float64, "float32": torch.float32, None: None}[arguments.dtype]
    if arguments.report:
        check_directory(Path(arguments.report))
    plan, timings = plan_of(arguments), Timings(time.monotonic)
    console = Console(stderr=arguments.json == "-")
    check_promised(plan)
    if arguments.bisect and is_rank():
        raise several_processes(plan)
    began = time.monotonic()
    verified = partial(
        verify, job, steps=arguments.steps, dtype=dtype, timeout_seconds=arguments.timeout, transport=arguments.transport,
        oversubscribe=arguments.oversubscribe, overcommit=arguments.overcommit, cache=arguments.cache,
    )  # fmt: skip
    with (
        ExitStack() as around,
        LongPhases(console) as phases,
        phases.of(timings) if is_first_rank() else nullcontext(),
    ):
        compare: Compare = compare_here
        if is_rank() and is_first_rank() and _computes_on_cpus(plan, arguments.devices):
            compare = around.enter_context(ReferenceProcess(arguments.command)).compare
        report = verified(
            plan, devices=arguments.devices, quick=arguments.quick, timings=timings, compare=compare,
        )  # fmt: skip
    if report is None:  # the process of another rank: rank 0 reports
        return 0
    print_report(report, console)
    is_soon = not is_rank() and time.monotonic() - began <= _SOON
    if not report.passed and (arguments.bisect or is_soon):
        devices = "simulated" if arguments.devices == "auto" and plan.mesh.size > 1 else arguments.devices
        report = _bisected(report, plan, partial(verified, devices=devices), arguments.quick, console)
    elif not report.passed:
        console.print("--devices simulated --bisect looks for the smallest plan that differs", soft_wrap=True)
    command = shlex.join(["meshloom", *sys.argv[1:]])
    if arguments.report:
        write_page(report, Path(arguments.report), command)
    if arguments.repro and not report.passed:
        write_reproduction(report, Path(arguments.repro), command)
    for record in report.records():
        records.write(**record)
    if not report.passed:
        text, code = f"The plan {plan} differs from one device: see the report.", 1
    elif arguments.whole_batch:
        text, code = _of_whole_batch(report)
    else:
        return 0
    if code:
        report_stop(text, code, main=report.passed)
    return code


def _of_whole_batch(report: Report) -> tuple[str, int]:
    """Why `--whole-batch` is not satisfied, and the exit code; 0: it is."""
    whole = report.whole
    if whole is None or not whole.ran:
        return f"--whole-batch: {whole_sentence(report)}.", 2
    return f"--whole-batch: {whole_sentence(report)}.", int(whole.interacts)


def several_processes(plan: Plan) -> DeviceError:
    """Why `--bisect` cannot be had where ranks are processes."""
    return DeviceError(
        f"--bisect verifies smaller plans in one process, and {plan} has {plan.mesh.size} here. Use --devices simulated, or leave --bisect out."
    )


def _bisected(
    report: Report, plan: Plan, verified: Callable[..., Report | None], quick: bool, console: Console
) -> Report:
    """The report of a plan that differs, with the smallest one; each plan is a line once it is known."""

    def print_line(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    def differs(smaller: Plan, quick: bool) -> bool | None:
        try:
            found = verified(smaller, quick=quick)
        except Exception as error:  # whatever it is, the plan that was asked for has its report
            print_line(f"  {smaller}: {type(error).__name__}: {error}")
            return None
        assert found is not None
        print_line(f"  {smaller}: {'equal' if found.passed else 'differs'}")
        return not found.passed

    print_line("Looking for the smallest plan that differs:")
    quick = quick or bool(report.first_wrong and differs(plan, quick=True))
    found = smallest_plan(plan, partial(differs, quick=quick))
    print_line(found.sentence)
    return replace(report, smallest=found)


def _computes_on_cpus(plan: Plan, devices: str) -> bool:
    """Whether ranks do. On GPUs one device is rank 0's, in whose memory another process would be, too."""
    chosen = launched_devices(devices)
    on_gpus = chosen == "auto" and plan.mesh.size <= torch.cuda.device_count()
    return not on_gpus and chosen in ("auto", "cpu")
