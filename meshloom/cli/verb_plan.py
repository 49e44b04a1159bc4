"""`meshloom plan`: price the plans that the devices allow."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from meshloom.cli.plan_lines import LOG_WIDTH
from meshloom.core.errors import PlanError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.units import parse_bytes
from meshloom.launch.allocator import keep_freed_memory
from meshloom.launch.devices import check_ranks
from meshloom.launch.environment import opened_cache
from meshloom.loops.ranks import check_of_loops
from meshloom.measure.at_hand import Wish, devices_for
from meshloom.measure.trials import try_plans
from meshloom.planner.advise import advise, finalists, tried
from meshloom.planner.rehearsal.rehearse import check_plan
from meshloom.report.advice import advice_records, print_advice
from meshloom.report.records import Records
from meshloom.report.terminal import LongPhases
from meshloom.telemetry.timings import Timings


def price_plans(arguments: argparse.Namespace, job: Job, records: Records, *, of_script: bool) -> int:
    """Exit code: 0 if there is a plan to recommend. of_script: whether the job is what a script shows."""
    stream = sys.stderr if arguments.json == "-" else sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else LOG_WIDTH)
    wish = Wish(
        devices=arguments.devices, ranks=arguments.ranks, memory_bytes=parse_bytes(arguments.memory) if arguments.memory else 0,
        transport=arguments.transport, machine=Path(arguments.machine) if arguments.machine else None,
        hosts=arguments.hosts,
    )  # fmt: skip
    tries: int | None = vars(arguments)["try"]  # a word that is no attribute's
    if tries and wish.machine:
        raise PlanError(
            f"--try trains on this machine, and --machine {wish.machine} prices plans for another. Leave one of them out."
        )
    if tries and wish.hosts > 1:
        raise PlanError(
            f"--try trains on this machine, and --hosts {wish.hosts} prices plans for several. Leave one of them out."
        )
    for name in ("fabric", "fix", "compare"):
        if vars(arguments)[name]:
            raise PlanError(
                f"--{name} is of a cluster that is not here. Add --cluster with its name, or leave it out."
            )
    plans = [Plan.parse(arguments.plan)] if arguments.plan else None
    rehearsed = "simulated" if wish.machine or wish.hosts > 1 else "cpu"
    for plan in plans or ():
        check_plan(job, plan)
        check_ranks(plan.mesh.size, rehearsed, arguments.oversubscribe)
    check_ranks(wish.num_ranks or 1, rehearsed, arguments.oversubscribe)
    devices = devices_for(wish, plans[0].mesh.size if plans else 1, lambda text: print(text, file=sys.stderr))
    if isinstance(devices, int):
        return devices
    if of_script:  # whose replicas have copies of their own
        devices = replace(devices, common_memory=False)
    keep_freed_memory()  # plans are rehearsed in this process as they run in others
    timings = Timings()
    with LongPhases(console) as phases, phases.within(timings) as tell:
        cache = opened_cache(arguments.cache)
        found = advise(
            job,
            devices,
            plans=plans,
            tell=tell,
            cache=cache,
            timings=timings,
            check=check_of_loops if of_script else None,
        )
        if tries:
            measured = try_plans(
                finalists(found, tries), arguments.target, arguments.transport, tell, arguments.words
            )
            if isinstance(measured, int):
                return measured
            found = tried(found, measured)
    print_advice(found, console)
    for record in advice_records(found):
        records.write(**record)
    return 0 if found.recommended else 1
