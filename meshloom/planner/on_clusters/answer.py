"""The answer to which plan a cluster should run: the best, its rivals of other kinds, what decided, how far it scales, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshloom.clusters.cluster import Cluster
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.units import format_bytes, format_count, format_seconds
from meshloom.planner.on_clusters.cluster_parts import ClusterParts
from meshloom.planner.on_clusters.search import Objective, Searched, divisors, kind_of, search
from meshloom.planner.on_clusters.step import ClusterStep, StepPricer

MOST_GPUS = 16384
SLOWER = 1.1  # where more GPUs take longer, still more are not tried
_PARTS = {
    "tp": "what is sent along tp",
    "bubble": "ranks that wait for others along pp",
    "pp": "messages along pp",
    "dp": "the exchange along dp",
    "update": "updates",
}


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """The best plan of so many GPUs; None: nothing fits, or divides. efficiency: GPU-seconds of a step on the fewest GPUs over those on these."""

    gpus: int
    step: ClusterStep | None
    efficiency: float


@dataclass(frozen=True, kw_only=True)
class ClusterAnswer:
    """rivals: the best of each other kind, fitting or not. steps: of the whole job."""

    cluster: Cluster
    searched: Searched
    best: ClusterStep | None
    rivals: tuple[ClusterStep, ...]
    scaled: tuple[Scaled, ...]
    steps: int

    @property
    def room(self) -> int:
        """Bytes that tensors may take on a device."""
        return self.cluster.device.memory_bytes - self.cluster.device.runtime_bytes

    def fits(self, step: ClusterStep) -> bool:
        """Whether its tensors do."""
        return step.peak <= self.room

    def interval(self, step: ClusterStep) -> tuple[float, float]:
        """Seconds between which nine of ten published steps on such devices lie."""
        error = self.cluster.device.step_error
        return step.seconds / (1 + error), step.seconds / (1 - error)

    def gpu_hours(self, step: ClusterStep) -> float:
        """Of all steps of the job."""
        return step.plan.mesh.size * step.seconds * self.steps / 3600

    def dollars(self, step: ClusterStep) -> float:
        """Of all steps of the job."""
        return self.gpu_hours(step) * self.cluster.dollars_per_gpu_hour


def answer(
    job: Job, cluster: Cluster, parts: ClusterParts, *, precision: str, fixed: Mapping[str, Any], objective: Objective, batch: int,
    told: Callable[[str], None] = lambda text: None, check: Callable[[Plan], None] | None = None,
) -> ClusterAnswer:  # fmt: skip
    """batch: samples of the global batch. objective: what the best plan takes least of; of cost, also on fewer hosts, as many as divide the cluster's. check: as
    of `search`. Raises errors of `ClusterParts.of` for one device."""
    parts.of(1)
    told("pricing all plans that divide")
    pricer = parts.pricer
    tried = (
        [replace(cluster, hosts=hosts) for hosts in divisors(cluster.hosts)]
        if objective == "cost"
        else [cluster]
    )
    searches = [
        (each, search(parts.of, pricer.on(each), each, batch, precision=precision, fixed=fixed, objective=objective, check=check))
        for each in reversed(tried)
    ]  # fmt: skip
    cluster, found = min(searches, key=_device_seconds)
    best = found.steps[0] if found.steps else None
    told("pricing it on more and fewer GPUs")
    scaled = _scaled(cluster, parts, pricer, best, batch, objective) if best else ()
    return ClusterAnswer(
        cluster=cluster, searched=found, best=best, rivals=tuple(_rivals(found, best)), scaled=scaled, steps=job.steps
    )  # fmt: skip


def _device_seconds(searched: tuple[Cluster, Searched]) -> float:
    cluster, found = searched
    return cluster.gpus * found.steps[0].seconds if found.steps else math.inf


def _rivals(found: Searched, best: ClusterStep | None) -> list[ClusterStep]:
    firsts: dict[tuple[bool, ...], ClusterStep] = {}
    for each in (*found.steps, *found.fits_not):
        firsts.setdefault(kind_of(each.plan), each)
    return [each for kind, each in firsts.items() if best is None or kind != kind_of(best.plan)]


def _scaled(
    cluster: Cluster,
    parts: ClusterParts,
    pricer: StepPricer,
    best: ClusterStep,
    batch: int,
    objective: Objective,
) -> tuple[Scaled, ...]:
    """With the settings of the best plan, but for its numbers of stages, replicas and microbatches. A part of a model is the same on any number
    of hosts."""
    plan = best.plan
    kept = {"tp": plan.tp, "zero": plan.zero, "recompute": plan.recompute}
    found: list[Scaled] = []
    hosts = 1
    while hosts * cluster.gpus_per_host <= MOST_GPUS and (hosts == 1 or cluster.fabric.rails):
        of = replace(cluster, hosts=hosts)
        searched = search(
            parts.of, pricer.on(of), of, batch, precision=plan.precision, fixed=kept, objective=objective, actions=0
        )  # fmt: skip
        step = searched.steps[0] if searched.steps else None
        first = next((each for each in found if each.step), None)
        efficiency = 1.0
        if step and first and first.step:
            efficiency = first.gpus * first.step.seconds / (of.gpus * step.seconds)
        found.append(Scaled(gpus=of.gpus, step=step, efficiency=efficiency))
        if step and step.seconds > SLOWER * min(each.step.seconds for each in found if each.step):
            break
        hosts *= 2
    return tuple(found)


def limits(step: ClusterStep, room: int) -> str:
    """What limits a plan, in words."""
    part, seconds = max(
        ((name, each) for name, each in step.breakdown.items() if name != "compute"),
        key=lambda found: found[1],
    )
    memory = f"{format_bytes(step.peak)} of {format_bytes(room)} are held"
    if seconds < 0.02 * step.seconds:
        return f"computation is {step.breakdown['compute'] / step.seconds:.0%} of a step; {memory}"
    return f"{_PARTS[part]} take {format_seconds(seconds)} of {format_seconds(step.seconds)}; {memory}"


def why_not(other: ClusterStep, best: ClusterStep, room: int) -> str:
    """The inequality that decided between a plan and the best one."""
    if other.peak > room:
        most = max(other.memory, key=lambda kind: other.memory[kind])
        return f"a rank would hold {format_bytes(other.peak)} of {format_bytes(room)}, {format_bytes(other.memory[most])} of it {most}"
    times = f"{other.seconds / best.seconds:.2f} times the step"
    part = max(other.breakdown, key=lambda name: other.breakdown[name] - best.breakdown[name])
    here, there = (format_seconds(each.breakdown[part]) for each in (other, best))
    if part == "dp":
        waits = _hiding(other)
        return f"{times}: {waits}"
    if part == "bubble":
        plan = other.plan
        return f"{times}: ranks of {plan.pp} stages wait {here} in {format_count(plan.microbatches, 'microbatch')}, and those of the best plan {there}"
    if part == "compute":
        return f"{times}: microbatches of {other.samples} compute for {here}, those of {best.samples} for {there}"
    return f"{times}: {_PARTS[part]} take {here} in place of {there}"


def _hiding(step: ClusterStep) -> str:
    """What computation hides of the exchange along dp, and what a microbatch would need for all of it."""
    takes, covers = format_seconds(step.dp_seconds), format_seconds(step.hides)
    said = f"the exchange along dp takes {takes}, and {covers} of computation hide {format_seconds(step.hidden)} of it"
    if step.plan.zero == 3 and step.dp_seconds > step.hides > 0:
        said += f"; below {round(step.samples * step.dp_seconds / step.hides)} samples a microbatch zero=3 cannot hide here"
    return said
