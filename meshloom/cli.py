"""The command line: text becomes values, one call is made, the result becomes text or JSON."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console

from meshloom.arguments import parse
from meshloom.asynchronous.options import check_asynchronous, circumstances_of, settings_of
from meshloom.asynchronous.playing import join
from meshloom.asynchronous.processes import ProcessRun
from meshloom.at_hand import Wish, devices_for
from meshloom.calibration import Request, measure_company, measure_here, measure_machine
from meshloom.cluster import load, machine_file, save
from meshloom.companions import advise_beside, be_companion
from meshloom.errors import PlanError
from meshloom.graph.chosen import text_of
from meshloom.job import Job
from meshloom.jobfile import as_program, check_target, load_job
from meshloom.launch import (
    check_ranks,
    check_timeout,
    choose_devices,
    choose_for_workers,
    default_ranks,
    is_first_rank,
    is_rank,
    launching_seconds,
    leave,
    report_failure,
    run_ranks,
)
from meshloom.plan import Plan, num_bytes_of
from meshloom.planner.advise import finalists, tried
from meshloom.planner.describe import describe
from meshloom.planner.divided import divided
from meshloom.planner.ranks import has_shares, shares_of
from meshloom.planner.readings import Readings
from meshloom.planner.rehearse import check_plan
from meshloom.planner.staged import stage_plan, staged
from meshloom.report.advice import advice_records, print_advice
from meshloom.report.description import description_records, print_description
from meshloom.report.directory import print_run_directory, read_run_directory, run_directory_records, show_timeline
from meshloom.report.machine import machine_records, print_machine
from meshloom.report.progress import Listener
from meshloom.report.records import Records, announce_start, listener_for, record_start, tell_summary
from meshloom.report.stages import lines_of, lines_of_ranks, stages_record
from meshloom.report.terminal import Terminal
from meshloom.timings import Timings
from meshloom.trainer import Trainer
from meshloom.trials import try_here, try_plans
from meshloom.verify.report import print_report
from meshloom.verify.run import check_promised, verify

LOG_WIDTH = 200  # columns of a table that goes to a file or a pipe


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 done, 1 the run failed, 2 the request was wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = parse(words)
    if is_rank():
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
            return _calibrate(arguments)
        if arguments.verb == "report":
            return _report(arguments)
        check_target(arguments.target)
        if getattr(arguments, "hang_seconds", 0) < 0:
            raise PlanError(f"--hang-seconds {arguments.hang_seconds:g} must be more than 0, or 0 to wait for ever.")
        if arguments.verb in ("describe", "plan"):
            return _run_here(arguments)
        plan = _plan(arguments)
        if arguments.verb == "train":
            check_asynchronous(arguments, plan)
            if plan.exchange == "async" or arguments.join is not None:
                return _run_here(arguments)
        if arguments.verb == "verify":
            check_promised(plan)
        kind, _ = choose_devices(plan.mesh, arguments.devices, arguments.oversubscribe)
        if kind in ("cuda", "cpu") and plan.mesh.size > 1:
            command = [sys.executable, "-m", "meshloom", *words]
            return run_ranks(command, plan.mesh, kind, str(plan), arguments.hang_seconds, arguments.transport)
        return _run_here(arguments)
    except KeyboardInterrupt:
        print("meshloom: interrupted", file=sys.stderr)
        return 130
    except BaseException as error:
        return report_failure(error)


def _plan(arguments: argparse.Namespace) -> Plan:
    plan = Plan.parse(arguments.plan) if arguments.plan else Plan() if arguments.verb == "describe" else Plan(dp=default_ranks(arguments.devices))
    return replace(plan, memory_bytes=num_bytes_of(arguments.memory)) if arguments.memory else plan


def _run_here(arguments: argparse.Namespace) -> int:
    if arguments.verb == "calibrate":
        return _calibrate(arguments)
    for flag in ("steps", "batch", "depth", "try"):
        if (number := getattr(arguments, flag, None)) is not None and number < 1:
            raise PlanError(f"--{flag} {number} must be 1 or more.")
    with ExitStack() as stack:
        stack.enter_context(as_program(arguments.target, arguments.words))
        timings = _timings()
        with timings.of("job file"):
            job = load_job(arguments.target)
        if job is None:
            text = f"meshloom: {arguments.target} returned nothing, so it ran a loop of its own. A function that names a job returns it."
            print(text, file=sys.stderr)
            return 0
        records = Records(arguments.json, stack)
        if arguments.verb == "describe":
            return _describe(arguments, job, records)
        if arguments.verb == "plan":
            if arguments.trial:
                try_here(job, arguments.transport, arguments.trial_steps, Path(arguments.trial))
                return 0
            if arguments.companion:
                be_companion(job, [int(each) for each in arguments.companion.split(",")])
                return 0
            return _advise(arguments, job, records)
        terminal = Terminal(Console(stderr=arguments.json == "-"))
        if arguments.verb == "verify":
            return _verify(arguments, job, terminal, records)
        return _train(arguments, job, terminal, records, timings)


def _timings() -> Timings:
    """Of a run, from the command on, by the clock on the wall."""
    timings = Timings(time.monotonic)
    timings.add("launcher", launching_seconds())
    timings.add("Python and imports", time.process_time())
    return timings


def _train(arguments: argparse.Namespace, job: Job, terminal: Terminal, records: Records, timings: Timings) -> int:
    plan = _plan(arguments)
    if arguments.join is not None:
        join(job, arguments.target, arguments.words, plan if arguments.plan else None, arguments.join, Path(arguments.key), arguments.timeout)
        return 0
    listener = listener_for(terminal, records)
    if plan.exchange == "async" and not is_rank():
        kind, why = choose_for_workers(
            plan.servers, plan.dp, arguments.devices, virtual=circumstances_of(arguments) is not None,
            ranks_per_worker=plan.pp * plan.tp, oversubscribe=arguments.oversubscribe,
        )  # fmt: skip
        if kind == "cpu":
            return _train_on_processes(arguments, job, plan, why, listener, terminal, records)
        arguments.devices = arguments.devices if arguments.devices != "auto" else kind
    with Trainer(
        job,
        plan,
        devices=arguments.devices,
        steps=arguments.steps,
        out=arguments.out,
        resume=arguments.resume,
        overwrite=bool(arguments.overwrite),
        timeout_seconds=arguments.timeout,
        transport=arguments.transport,
        oversubscribe=arguments.oversubscribe,
        share=True,
        listener=listener,
        circumstances=circumstances_of(arguments),
        snapshot_every=arguments.snapshot_every,
        timings=timings,
    ) as trainer:
        if trainer.world.main:
            _announce(trainer, terminal, records)
        summary = trainer.fit()
        if trainer.world.main:
            tell_summary(summary, terminal, records)
            if trainer.shares.record:
                records.write("shares", record=trainer.shares.record)
            if trainer.asynchronous:
                records.write("asynchronous", **trainer.asynchronous.record())
        ended = time.monotonic()
    if arguments.timings and trainer.world.main:
        timings.add("parting", time.monotonic() - ended)
        stepping = sum(timings.seconds.get(phase, 0.0) for phase in ("first step", "steps"))
        outside = sum(timings.seconds.values()) - stepping
        terminal.event(f"seconds: {timings.told()} Outside of steps: {outside:.1f}.")
        records.write("timings", plan=str(plan), seconds=timings.seconds, notes=timings.notes)
    return 0


def _train_on_processes(
    arguments: argparse.Namespace, job: Job, plan: Plan, why: str, listener: Listener, terminal: Terminal, records: Records
) -> int:
    """The launcher's part: servers and workers are processes that it starts."""
    settings = settings_of(arguments, job)
    run = ProcessRun(job, plan, settings, listener, arguments.target, arguments.words)
    listener.started(f"plan {plan} on {why}")
    parameters = sum(each.numel() for each in run.model.parameters())
    announce_start(job, plan, run.model, parameters, settings.steps, run.next_step, terminal)
    record_start(job, plan, "cpu", why, run.model, parameters, settings.steps, run.next_step, records)
    summary = run.fit()
    tell_summary(summary, terminal, records)
    records.write("asynchronous", **run.record())
    return 0


def _announce(trainer: Trainer, terminal: Terminal, records: Records) -> None:
    job, plan = trainer.job, trainer.plan
    model = trainer.asynchronous.model if trainer.asynchronous else trainer.replicas[0].model
    parameters = sum(each.numel() for each in model.parameters()) if trainer.asynchronous else trainer.replicas[0].num_parameters()
    announce_start(job, plan, model, parameters, trainer.steps, trainer.next_step, terminal)
    staged = trainer.replicas[0].staged if trainer.replicas else None
    division = staged.division if staged else None
    if division is not None and division.rates is not None:
        terminal.event(f"divided over tp={plan.tp} at {division.rates.source}")
    staging = staged.staging if staged else None
    if staging is not None and staging.choice is not None and staging.rates is not None:
        crossings = [[each for stage in staging.first for each in stage.incoming]] * len(staging.sizes)
        found = stage_plan(plan, staging.schedule(len(staging.sizes)), staging.choice, crossings, staging.sizes, staging.rates)
        for line in lines_of(found):
            terminal.event(line)
        records.write("stages", **stages_record(found))
    record_start(job, plan, trainer.world.kind, trainer.world.why, model, parameters, trainer.steps, trainer.next_step, records)


def _verify(arguments: argparse.Namespace, job: Job, terminal: Terminal, records: Records) -> int:
    dtype = {"float64": torch.float64, "float32": torch.float32, None: None}[arguments.dtype]
    report = verify(
        job,
        _plan(arguments),
        devices=arguments.devices,
        steps=arguments.steps,
        dtype=dtype,
        timeout_seconds=arguments.timeout,
        transport=arguments.transport,
        oversubscribe=arguments.oversubscribe,
    )
    if report is None:  # the process of another rank: rank 0 reports
        return 0
    print_report(report, Console(stderr=arguments.json == "-"))
    for record in report.records():
        records.write(**record)
    return 0 if report.passed else 1


def _describe(arguments: argparse.Namespace, job: Job, records: Records) -> int:
    started = time.process_time()  # Python, PyTorch, and the job's file
    plan = _plan(arguments)
    plan.check_batch(arguments.batch or job.batch_size)
    check_ranks(plan.tp * plan.pp, "simulated", arguments.oversubscribe)
    given = load(Path(arguments.machine)) if arguments.machine else None
    known = [machine_file(device) for device in (["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"])]
    here = next((each for each in known if each.is_file()), None)
    readings = Readings(job)
    description = describe(readings, batch_size=arguments.batch, machine=given or (load(here) if here else None))
    stream = sys.stderr if arguments.json == "-" else sys.stdout
    print_description(description, Console(file=stream, width=None if stream.isatty() else LOG_WIDTH), arguments.depth)
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
        shares = shares_of(readings, plan, division, stages, batch_size=arguments.batch, optimizer_factor=description.optimizer_factor)
        print("", *lines_of_ranks(shares), sep="\n", file=stream)
        records.write("ranks", plan=str(plan), ranks=[asdict(each) for each in shares])
    if arguments.timings:
        seconds = {"start": started, **readings.timings.seconds}
        told = ", ".join(f"{phase} {taken:.1f}" for phase, taken in seconds.items())
        print(f"\nCPU seconds: {told}; {sum(seconds.values()):.1f} in all", file=stream)
        records.write("timings", plan=str(plan), seconds=seconds)
    return 0


def _advise(arguments: argparse.Namespace, job: Job, records: Records) -> int:
    stream = sys.stderr if arguments.json == "-" else sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else LOG_WIDTH)
    wish = Wish(
        devices=arguments.devices, ranks=arguments.ranks, memory_bytes=num_bytes_of(arguments.memory) if arguments.memory else 0,
        transport=arguments.transport, machine=Path(arguments.machine) if arguments.machine else None,
    )  # fmt: skip
    tries: int | None = vars(arguments)["try"]  # a word that is no attribute's
    if tries and wish.machine:
        raise PlanError(f"--try trains on this machine, and --machine {wish.machine} prices plans for another. Leave one of them out.")
    plans = [Plan.parse(arguments.plan)] if arguments.plan else None
    for plan in plans or ():
        check_plan(job, plan)
        check_ranks(plan.mesh.size, "simulated" if wish.machine else "cpu", arguments.oversubscribe)
    check_ranks(wish.num_ranks or 1, "simulated" if wish.machine else "cpu", arguments.oversubscribe)
    devices = devices_for(wish, plans[0].mesh.size if plans else 1, lambda text: print(text, file=sys.stderr))
    if isinstance(devices, int):
        return devices
    with console.status("") as status:
        found = advise_beside(job, arguments.target, devices, words=arguments.words, plans=plans, tell=status.update)
        if tries:
            measured = try_plans(finalists(found, tries), arguments.target, arguments.transport, status.update, arguments.words)
            if isinstance(measured, int):
                return measured
            found = tried(found, measured)
    print_advice(found, console)
    for record in advice_records(found):
        records.write(**record)
    return 0 if found.recommended else 1


def _report(arguments: argparse.Namespace) -> int:
    stream = sys.stderr if arguments.json == "-" else sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else LOG_WIDTH)
    directory = Path(arguments.run)
    if arguments.timeline is not None or arguments.step is not None:
        show_timeline(directory, arguments.timeline or "-", arguments.step, console)
    else:
        print_run_directory(read_run_directory(directory), console)
    if arguments.json is not None:
        with ExitStack() as stack:
            records = Records(arguments.json, stack)
            for record in run_directory_records(read_run_directory(directory)):
                records.write(**record)
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    """Measure with ranks of our own, or as one of those that were started; the first of them writes and prints."""
    started = time.perf_counter()
    request = Request(devices=arguments.devices, ranks=arguments.ranks, transport=arguments.transport, timeout_seconds=arguments.timeout)
    if arguments.company:
        company = measure_company(request)
        if is_first_rank():
            Path(arguments.company).write_text(company.to_json(), encoding="utf-8")
        return 0
    machine = measure_here(request) if is_rank() else measure_machine(request)
    if isinstance(machine, int):
        return machine
    if not is_first_rank():
        return 0
    if arguments.part:
        save(machine, Path(arguments.part))
        return 0
    path = Path(arguments.out) if arguments.out else machine_file(machine.device)
    save(machine, path)
    console = Console(stderr=arguments.json == "-")
    print_machine(machine, console)
    console.print(f"written to {path} ({time.perf_counter() - started:.1f} s of measuring)", markup=False, highlight=False, soft_wrap=True)
    with ExitStack() as stack:
        records = Records(arguments.json, stack)
        for record in machine_records(machine):
            records.write(**record)
    return 0
