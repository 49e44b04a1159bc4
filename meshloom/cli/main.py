"""The command line: text becomes values, one function is called, its result becomes text or JSON.

A verb's code is imported when the verb is known, which makes starts a third faster.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from meshloom.asynchronous.options import check_asynchronous
from meshloom.cli.arguments import parse, parser
from meshloom.cli.plan_lines import plan_of
from meshloom.core.errors import DeviceError, PlanError
from meshloom.core.jobfile import as_program, check_no_script, check_target, is_script, load_job
from meshloom.launch.devices import choose_devices
from meshloom.launch.environment import is_rank, launching_seconds, ranks_aside, reference_descriptor
from meshloom.launch.failure import leave, report_failure
from meshloom.launch.opening import check_timeout
from meshloom.launch.processes.launcher import run_ranks
from meshloom.telemetry.timings import Timings

# the verbs that a launcher may start many times
_OF_RANKS = ("train", "run", "verify", "calibrate", "describe", "plan")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 done, 1 the run failed, 2 the request was wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = parse(words)
    arguments.command = [sys.executable, "-m", "meshloom", *words]
    try:
        is_started = reference_descriptor() is not None or (arguments.verb in _OF_RANKS and is_rank())
    except DeviceError as error:
        return report_failure(error)
    if is_started:
        try:
            return _run_here(arguments)
        except SystemExit as leaving:  # the user's own
            raise SystemExit(report_failure(leaving)) from None
        except BaseException as error:
            leave(report_failure(error))
    try:
        if "timeout" in arguments:
            check_timeout(arguments.timeout, "--timeout ")
        if arguments.verb == "calibrate":
            from meshloom.cli.verb_calibrate import calibrate

            return calibrate(arguments)
        if arguments.verb == "report":
            from meshloom.cli.verb_report import report

            return report(arguments)
        if arguments.verb == "watch":
            from meshloom.cli.verb_watch import watch

            return watch(arguments)
        if arguments.verb == "export":
            from meshloom.cli.verb_export import export

            return export(arguments)
        if arguments.verb == "doctor":
            from meshloom.cli.verb_doctor import doctor

            return doctor(arguments)
        if arguments.verb == "completion":
            from meshloom.cli.verb_doctor import completion

            return completion(arguments, parser())
        if arguments.verb == "adopt":
            from meshloom.cli.verb_adopt import adopt_script

            return adopt_script(arguments)
        if arguments.verb == "run":
            from meshloom.cli.verb_run import start_script

            return start_script(arguments)
        (check_no_script if arguments.verb == "train" else check_target)(arguments.target)
        if getattr(arguments, "hang_seconds", 0) < 0:
            raise PlanError(
                f"--hang-seconds {arguments.hang_seconds:g} must be more than 0, or 0 to wait for ever."
            )
        _check_counts(arguments)
        if arguments.verb == "verify" and is_script(arguments.target):
            from meshloom.cli.verb_verify_script import verify_script

            return verify_script(arguments)
        if arguments.verb in ("describe", "plan"):
            return _run_here(arguments)
        plan = plan_of(arguments)
        if arguments.verb == "train":
            check_asynchronous(arguments, plan)
            if not plan.synchronous or arguments.join is not None:
                return _run_here(arguments)
        if arguments.verb == "verify":
            from meshloom.verify.run import check_promised

            check_promised(plan)
        kind, _ = choose_devices(plan.mesh, arguments.devices, arguments.oversubscribe)
        if kind in ("cuda", "cpu") and plan.mesh.size > 1:
            if getattr(arguments, "bisect", False):
                from meshloom.cli.verb_verify import several_processes

                raise several_processes(plan)
            return run_ranks(
                arguments.command, plan.mesh, kind, str(plan), arguments.hang_seconds, arguments.transport
            )
        return _run_here(arguments)
    except KeyboardInterrupt:
        print("meshloom: interrupted", file=sys.stderr)
        return 130
    except BaseException as error:
        return report_failure(error)


def _run_here(arguments: argparse.Namespace) -> int:
    if arguments.verb == "calibrate":
        from meshloom.cli.verb_calibrate import calibrate

        return calibrate(arguments)
    if arguments.verb == "run":
        from meshloom.cli.verb_run import run_script

        return run_script(arguments)
    _check_counts(arguments)
    of_script = arguments.verb in ("verify", "describe", "plan") and is_script(arguments.target)
    if of_script and is_rank():
        raise DeviceError(
            f"{arguments.target} is a script, which meshloom {arguments.verb} itself runs. Start it once, not on each rank."
        )
    with ExitStack() as stack:
        stack.enter_context(ranks_aside())
        stack.enter_context(as_program(arguments.target, arguments.words))
        timings = _timings()
        if of_script:
            from meshloom.cli.script_job import job_of_script

            job, notes = stack.enter_context(job_of_script(arguments))
            print(*notes, "", sep="\n", file=sys.stderr if arguments.json == "-" else sys.stdout)
        else:
            with timings.of("job file"):
                job = load_job(arguments.target)
        if job is None:
            text = f"meshloom: {arguments.target} returned nothing, so it ran its own loop. A function that names a job returns it."
            print(text, file=sys.stderr)
            return 0
        if (descriptor := reference_descriptor()) is not None:
            from meshloom.verify.apart import serve_reference

            serve_reference(job, descriptor)
            return 0
        from meshloom.report.records import Records

        records = Records(arguments.json, stack)
        if arguments.verb == "describe":
            from meshloom.cli.verb_describe import describe_job

            return describe_job(arguments, job, records)
        if arguments.verb == "plan":
            if arguments.trial:
                from meshloom.measure.trials import try_here

                try_here(job, arguments.transport, arguments.trial_steps, Path(arguments.trial))
                return 0
            if arguments.cluster:
                from meshloom.cli.verb_plan_cluster import price_for_cluster

                return price_for_cluster(arguments, job, records, of_script=of_script)
            from meshloom.cli.verb_plan import price_plans

            return price_plans(arguments, job, records, of_script=of_script)
        if arguments.verb == "verify":
            from meshloom.cli.verb_verify import verify_plan

            return verify_plan(arguments, job, records)
        from meshloom.cli.verb_train import train

        return train(arguments, job, records, timings)


def _check_counts(arguments: argparse.Namespace) -> None:
    for flag in ("steps", "batch", "depth", "try"):
        if (number := getattr(arguments, flag, None)) is not None and number < 1:
            raise PlanError(f"--{flag} {number} must be 1 or more.")


def _timings() -> Timings:
    """Wall-clock timings of a run, from the command on."""
    timings = Timings(time.monotonic)
    timings.add("launcher", launching_seconds())
    timings.add("Python and imports", time.process_time())
    return timings
