"""All plans of a job on a cluster: what divides is priced, what fits is ranked, and of the rest it is known why not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from meshloom.clusters.cluster import Cluster
from meshloom.core.errors import PlanError
from meshloom.core.plan import Plan
from meshloom.planner.on_clusters.part import ModelPart
from meshloom.planner.on_clusters.step import ClusterStep, StepPricer, executed_actions, stages_per_rank

Objective = Literal["time", "memory", "cost"]
PartOf = Callable[[int], ModelPart]  # of a size of tp; raises `PlanError`
FINALISTS = 24  # plans whose schedules are executed on paper before others
ACTIONS = 100_000  # that are executed on paper, some ten seconds
_SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v")
_RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class Searched:
    """steps: of plans that fit, the best first. fits_not: of those that do not, by what a rank would hold. refused: reason -> number of plans."""

    steps: tuple[ClusterStep, ...]
    fits_not: tuple[ClusterStep, ...]
    refused: Mapping[str, int]

    @property
    def priced(self) -> int:
        """Number of plans that were priced."""
        return len(self.steps) + len(self.fits_not)


def search(
    parts: PartOf, pricer: StepPricer, cluster: Cluster, batch: int, *, precision: str = "float32", fixed: Mapping[str, Any] | None = None,
    objective: Objective = "time", plans: tuple[Plan, ...] = (), actions: int = ACTIONS, check: Callable[[Plan], None] | None = None,
) -> Searched:  # fmt: skip
    """batch: samples of the global batch. fixed: settings that all plans have. plans: price these alone. actions: how many of schedules are executed on paper.
    check: raises `PlanError` for plans that are refused."""
    room = cluster.device.memory_bytes - cluster.device.runtime_bytes
    fitting: list[ClusterStep] = []
    others: list[ClusterStep] = []
    refused = Counter[str]()
    for plan in plans or _plans(cluster, batch, precision, fixed or {}, refused):
        for recompute in (plan.recompute,) if plans or "recompute" in (fixed or {}) else _RECOMPUTE:
            tried = replace(plan, recompute=recompute)
            try:
                if check:
                    check(tried)
                step = pricer.step(tried, parts(plan.tp), batch // (plan.dp * plan.microbatches))
            except PlanError as error:
                if plans:
                    raise
                refused[_short(error)] += 1
                break
            (fitting if step.peak <= room else others).append(step)
            if step.peak <= room:  # what is recomputed takes longer
                break
    order = _order(objective)
    found = _executed(fitting, parts, pricer, actions) if objective != "memory" else fitting
    return Searched(
        steps=tuple(sorted(found, key=order)), fits_not=tuple(sorted(others, key=lambda each: each.peak)), refused=refused
    )  # fmt: skip


def _executed(steps: list[ClusterStep], parts: PartOf, pricer: StepPricer, actions: int) -> list[ClusterStep]:
    """With their schedules executed on paper, as far as `actions` reach: first of those that look best, and then of all that could be better than the
    best, as they would be if no rank waited."""
    steps = sorted(steps, key=lambda each: each.seconds)
    likely, others = steps[:FINALISTS], steps[FINALISTS:]
    found: list[ClusterStep] = []
    best = math.inf
    for each in (*likely, *sorted(others, key=_bound)):
        size = executed_actions(each.plan) if each.plan.pp > 1 else 0
        if size <= actions and (len(found) < FINALISTS or _bound(each) < best):
            actions -= size
            each = pricer.step(each.plan, parts(each.plan.tp), each.samples, simulated=True) if size else each
        best = min(best, each.seconds)
        found.append(each)
    return found


def _bound(step: ClusterStep) -> float:
    """Seconds, if no rank waited for another along pp."""
    return step.seconds - step.breakdown["bubble"] - step.breakdown["pp"]


def _plans(
    cluster: Cluster, batch: int, precision: str, fixed: Mapping[str, Any], refused: Counter[str]
) -> Iterator[Plan]:
    gpus = cluster.gpus
    for tp in divisors(min(gpus, cluster.gpus_per_host)):
        for pp in divisors(gpus // tp) if gpus % tp == 0 else ():
            dp = gpus // tp // pp
            if batch % dp:
                refused[f"a batch of {batch} is not divisible by dp"] += 1
                continue
            for settings in _settings(dp, pp, batch // dp):
                found: dict[str, Any] = {"tp": tp, "pp": pp, "dp": dp, "precision": precision, **settings}
                if any(found.get(name, value) != value for name, value in fixed.items()):
                    continue
                try:
                    yield Plan(**{**found, **fixed})
                except PlanError as error:
                    refused[_short(error)] += 1


def _settings(dp: int, pp: int, samples: int) -> Iterator[dict[str, Any]]:
    """samples: of a replica's part of the batch."""
    for size in divisors(samples):
        for zero in (0, 1, 2, 3) if dp > 1 else (0,):
            if pp == 1:
                yield {"microbatches": samples // size, "zero": zero}
                continue
            for schedule in _SCHEDULES:
                for number in stages_per_rank(schedule):
                    virtual = {"virtual_stages": number} if schedule == "interleaved" else {}
                    yield {"microbatches": samples // size, "zero": zero, "schedule": schedule, **virtual}


def kind_of(plan: Plan) -> tuple[bool, bool, bool]:
    """Plans of one kind differ in numbers alone: whether parameters are divided along tp, along pp, and over replicas."""
    return plan.tp > 1, plan.pp > 1, plan.zero == 3


def _order(objective: Objective) -> Callable[[ClusterStep], tuple[float, float]]:
    return (
        (lambda step: (step.peak, step.seconds))
        if objective == "memory"
        else lambda step: (step.seconds, step.peak)
    )


def divisors(number: int) -> list[int]:
    """All of them, the least first."""
    return [each for each in range(1, number + 1) if number % each == 0]


def _short(error: PlanError) -> str:
    return str(error).partition(". ")[0].rstrip(".")
