"""`meshloom plan --cluster`: price plans for a cluster that is not here."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from meshloom.cli.plan_lines import LOG_WIDTH
from meshloom.clusters.cluster import Cluster, load, named
from meshloom.core.errors import PlanError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.launch.environment import opened_cache
from meshloom.loops.ranks import check_of_loops
from meshloom.planner.on_clusters.answer import ClusterAnswer, answer
from meshloom.planner.on_clusters.cluster_parts import ClusterParts
from meshloom.planner.on_clusters.search import Searched, search
from meshloom.report.cluster_answer import answer_records, print_answer, print_compared
from meshloom.report.records import Records
from meshloom.report.terminal import LongPhases
from meshloom.telemetry.timings import Timings

PRECISION = "bf16-mixed"
_NOT_HERE = ("devices", "ranks", "memory", "machine", "try", "trial")


def price_for_cluster(arguments: argparse.Namespace, job: Job, records: Records, *, of_script: bool) -> int:
    """Exit code: 0 if there is a plan that fits. of_script: whether the job is what a script shows."""
    for name in _NOT_HERE:
        given = vars(arguments)[name]
        if given and (name, given) != ("devices", "auto"):
            raise PlanError(
                f"--{name} is of devices that are here, and --cluster {arguments.cluster} of others. Leave one of them out."
            )
    cluster = _cluster(arguments)
    fixed = _fixed(arguments.fix)
    plans = [Plan.parse(text) for text in arguments.compare or ([arguments.plan] if arguments.plan else [])]
    for plan in plans:
        if plan.mesh.size > cluster.gpus:
            raise PlanError(
                f"{plan} needs {plan.mesh.size} GPUs, and {cluster.name} with --hosts {cluster.hosts} has {cluster.gpus}."
            )
        plan.check_batch(job.batch_size)
    precision = plans[0].precision if plans else str(fixed.get("precision", PRECISION))
    if any(each.precision != precision for each in plans):
        raise PlanError(
            "Plans that are compared must have the same precision; compare them one after the other."
        )
    stream = sys.stderr if arguments.json == "-" else sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else LOG_WIDTH)
    timings = Timings()
    with LongPhases(console) as phases, phases.within(timings) as tell:
        compiled = str(fixed.get("compile", plans[0].compile if plans else "none")) == "true"
        parts = ClusterParts(
            job,
            cluster,
            precision=precision,
            compiled=compiled,
            cache=opened_cache(arguments.cache),
            timings=timings,
        )
        if plans:
            searched = search(parts.of, parts.pricer, cluster, job.batch_size, plans=tuple(plans))
            found = _of_plans(cluster, searched, job)
        else:
            found = answer(
                job, cluster, parts, precision=precision, fixed=fixed, objective=arguments.objective, batch=job.batch_size, told=tell,
                check=check_of_loops if of_script else None,
            )  # fmt: skip
    if not found.searched.priced:
        raise PlanError(
            f"No plan of {cluster.gpus} GPUs and a batch of {job.batch_size} has {arguments.fix or 'sizes that divide them'}. Leave out --fix, or change the batch."
        )
    priced = (*found.searched.steps, *found.searched.fits_not)
    if plans:
        order = {str(plan): number for number, plan in enumerate(plans)}
        print_compared(found, sorted(priced, key=lambda each: order[str(each.plan)]), console)
    else:
        print_answer(found, console)
    for record in answer_records(found, priced):
        records.write(**record)
    return 0 if found.searched.steps else 1


def _cluster(arguments: argparse.Namespace) -> Cluster:
    is_file = arguments.cluster.endswith(".toml") or Path(arguments.cluster).is_file()
    make = load if is_file else named
    return make(arguments.cluster, hosts=arguments.hosts, fabric=arguments.fabric)


def _fixed(text: str | None) -> dict[str, Any]:
    """The settings that a text like `tp=8,zero=1` names."""
    if not text:
        return {}
    names = [each.partition("=")[0].strip() for each in text.split(",")]
    plan = Plan.parse(text)
    return {name: getattr(plan, name) for name in names}


def _of_plans(cluster: Cluster, searched: Searched, job: Job) -> ClusterAnswer:
    best = searched.steps[0] if searched.steps else None
    return ClusterAnswer(cluster=cluster, searched=searched, best=best, rivals=(), scaled=(), steps=job.steps)
