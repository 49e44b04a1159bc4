"""`meshloom train`: train a job under a plan."""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from meshloom.asynchronous.options import circumstances_of, settings_of
from meshloom.cli.plan_lines import plan_of
from meshloom.core.exchange_refusals import check_exchange
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.launch.devices import choose_for_workers
from meshloom.launch.environment import is_first_rank, is_rank
from meshloom.planner.staged_plan import stage_plan
from meshloom.replica.program_stages import ProgramStages
from meshloom.report.dashboards import check_dashboards, dashboards_listener
from meshloom.report.records import Records, RunStart, listener_for, tell_summary
from meshloom.report.stages import lines_of, stages_record
from meshloom.report.terminal import Terminal
from meshloom.telemetry.metrics_file import metrics_listener
from meshloom.telemetry.progress import Listener, all_of
from meshloom.telemetry.timings import Timings
from meshloom.train.log.run_start import WhereItRuns
from meshloom.train.log.training_log import TrainingLog
from meshloom.train.trainer import Trainer


def train(arguments: argparse.Namespace, job: Job, records: Records, timings: Timings) -> int:
    """Exit code 0. timings: of the start until now."""
    plan = plan_of(arguments)
    job = replace(job, checkpoint=arguments.checkpoint) if arguments.checkpoint else job
    if arguments.join is not None:
        from meshloom.asynchronous.start_role import join

        own, key = plan if arguments.plan else None, Path(arguments.key)
        join(job, arguments.target, arguments.words, own, arguments.join, key, arguments.timeout)
        return 0
    check_exchange(job, plan)
    terminal = Terminal(Console(stderr=arguments.json == "-"))
    listener = listener_for(terminal, records)
    logs = arguments.log or []
    check_dashboards(logs, arguments.out)
    if not plan.synchronous and not is_rank():
        kind, why = choose_for_workers(
            plan.servers, plan.dp, arguments.devices, virtual=circumstances_of(arguments) is not None,
            oversubscribe=arguments.oversubscribe,
        )  # fmt: skip
        if kind == "cpu":
            with ExitStack() as stack:
                out = Path(arguments.out) if arguments.out else None
                both = [listener, *([metrics_listener(out, listener.note)] if out else [])]
                both += [dashboards_listener(logs, out, _facts(arguments, job, plan), stack)] if logs else []
                return _train_on_processes(arguments, job, plan, why, all_of(both), terminal, records)
        arguments.devices = arguments.devices if arguments.devices != "auto" else kind
    shown = terminal.showing(timings) if is_first_rank() else nullcontext()
    with ExitStack() as stack, shown, Trainer(
        job, plan, devices=arguments.devices, steps=arguments.steps, out=arguments.out, resume=arguments.resume, overwrite=bool(arguments.overwrite),
        timeout_seconds=arguments.timeout, transport=arguments.transport, oversubscribe=arguments.oversubscribe, share=True,
        listener=[listener, dashboards_listener(logs, Path(arguments.out) if arguments.out else None, _facts(arguments, job, plan), stack)],
        circumstances=circumstances_of(arguments), snapshot_every=arguments.snapshot_every, cache=arguments.cache, timings=timings,
        overcommit=arguments.overcommit,
    ) as trainer:  # fmt: skip
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
        terminal.event(f"seconds: {timings.summary()} Outside of steps: {outside:.1f}.")
        records.write("timings", plan=str(plan), seconds=timings.seconds, notes=timings.notes)
    return 0


def _train_on_processes(
    arguments: argparse.Namespace, job: Job, plan: Plan, why: str, listener: Listener, terminal: Terminal, records: Records
) -> int:  # fmt: skip
    """The launcher's part of a run whose servers and workers are processes."""
    from meshloom.asynchronous.processes import ProcessRun

    settings = settings_of(arguments, job)
    with ExitStack() as stack:
        log: TrainingLog | None = None
        if settings.out is not None:
            log = stack.enter_context(TrainingLog(settings.out, goes_on=settings.resume is not None))
            listener = log.beside(listener)
        run = stack.enter_context(
            closing(ProcessRun(job, plan, settings, listener, arguments.target, arguments.words))
        )
        if log:
            log.start(job, plan, WhereItRuns("cpu", why), [], steps=settings.steps, step=run.next_step)
        listener.started(f"plan {plan} on {why}")
        start = RunStart(
            job=job, plan=plan, model=type(run.model).__name__, parameters=_elements(run.model), steps=settings.steps, step=run.next_step,
            devices="cpu", why=why,
        )  # fmt: skip
        start.announce(terminal)
        start.record(records)
        tell_summary(run.fit(), terminal, records)
        records.write("asynchronous", **run.record())
    return 0


def _announce(trainer: Trainer, terminal: Terminal, records: Records) -> None:
    plan = trainer.plan
    model = trainer.asynchronous.model if trainer.asynchronous else trainer.replicas[0].model
    start = RunStart(
        job=trainer.job,
        plan=plan,
        model=type(model).__name__,
        parameters=_elements(model) if trainer.asynchronous else trainer.replicas[0].num_parameters,
        steps=trainer.steps,
        step=trainer.next_step,
        devices=trainer.world.kind,
        why=trainer.world.why,
        digest=trainer.synchronous.digest if trainer.synchronous else "",
    )
    start.announce(terminal)
    engine = trainer.replicas[0].engine if trainer.replicas else None
    division = engine.stages.division if engine else None
    if division is not None and division.rates is not None:
        terminal.event(f"divided over tp={plan.tp} at {division.rates.source}")
    cutter = engine.stages.cutter if engine and isinstance(engine.stages, ProgramStages) else None
    if cutter is not None and cutter.choice is not None and cutter.rates is not None:
        sizes = cutter.sizes
        crossings = [[each for stage in cutter.first for each in stage.incoming]] * len(sizes)
        schedule = cutter.schedule(len(sizes))
        found = stage_plan(plan, schedule, cutter.choice, crossings, sizes, cutter.rates)
        for line in lines_of(found):
            terminal.event(line)
        records.write("stages", **stages_record(found))
    start.record(records)


def _facts(arguments: argparse.Namespace, job: Job, plan: Plan) -> dict[str, Any]:
    """What a dashboard shows of the run beside its numbers."""
    return {
        "job": arguments.target,
        "plan": str(plan),
        "batch_size": job.batch_size,
        "steps": arguments.steps or job.steps,
        "seed": job.seed,
    }


def _elements(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())
