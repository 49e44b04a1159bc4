"""Whether a run can fit into memory: what its ranks need at least, the limit, and nearby plans that would fit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.core.cache import Cache
from meshloom.core.errors import MeshloomError
from meshloom.core.job import Job, NamedParameters
from meshloom.core.plan import Plan
from meshloom.core.random import preserved_draws
from meshloom.core.units import format_bytes, format_count
from meshloom.optimizer.bfloat16.lowered import has_masters
from meshloom.optimizer.reach import expected_state_bytes
from meshloom.optimizer.user_optimizer import make_without_values
from meshloom.planner.divided import divided
from meshloom.planner.memory.rank_memory import RankMemory, gathered_bytes
from meshloom.planner.ranks import ranks_of
from meshloom.planner.readings import Readings
from meshloom.planner.staged_plan import staged

MARGIN = 1.1  # a run is refused beyond so many times its limit: predictions have errors
OFFERS = 3  # plans that are named
SECONDS = 60.0  # for finding them


@dataclass(frozen=True, kw_only=True)
class Limit:
    """num_bytes: of one rank, or of all ranks of a host together. source: where it comes from, as words."""

    num_bytes: int
    source: str
    is_shared: bool = False


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of one device's optimizer state. gathered: of parameters that every rank has whole, because their optimizers look at
    all of them; of_gathered: of these' state."""

    total: int
    gathered: int = 0
    of_gathered: int = 0


def least_bytes(plan: Plan, named: NamedParameters, state: StateBytes, *, one_copy: bool) -> dict[str, int]:
    """What the fullest rank holds at least, by kind: parameters, gradients and optimizer state alone.

    named: all parameters of the model, of which only shapes are read. state: what is offloaded is elsewhere. one_copy:
    replicas may be counted their share of one copy.
    """
    split = plan.tp * plan.pp
    whole = sum(each.nbytes for _, each in named)
    trained = sum(each.nbytes for _, each in named if each.requires_grad)
    one = plan.dp if one_copy and not state.gathered else 1
    of_state = max(one, plan.mesh.num_slices if plan.zero else 1)
    slices = plan.mesh.num_slices if one == 1 else plan.dp
    needs = {
        "parameters": whole // split // (slices if plan.zero == 3 else one),
        "gradients": trained // split // (plan.mesh.num_slices if plan.zero >= 2 else 1),
        "optimizer": (state.total - state.of_gathered) // split // of_state + state.of_gathered,
    }
    values, gradients = gathered_bytes(plan, state.gathered)
    needs["parameters"] += values
    needs["gradients"] += gradients
    return needs if plan.offload == "none" else {**needs, "optimizer": 0}


def state_bytes(job: Job, named: NamedParameters) -> StateBytes | None:
    """Of the state that the job's optimizers make for these parameters, by their classes (`reach.py`); None if the job's function
    needs values."""
    trainable = [(name, _without_values(each)) for name, each in named if each.requires_grad]
    masters: list[Tensor] = []
    if has_masters(job.optimizer):
        own = dict(trainable)
        trainable = [(name, _master_of(each)) for name, each in trainable]
        masters = [each for name, each in trainable if each is not own[name]]
    with preserved_draws():
        made = make_without_values(job, trainable)
    if made is None:
        return None
    averages = [each for _, each in trainable] if made.average is not None else []
    return StateBytes(
        total=sum(map(expected_state_bytes, made.optimizers))
        + sum(each.nbytes for each in [*masters, *averages]),
        gathered=made.gathered_bytes,
        of_gathered=sum(map(expected_state_bytes, made.at_once)),
    )


def too_much(needs: Sequence[Mapping[str, int]], limit: Limit) -> bool:
    """Whether ranks that need so much, by kind, cannot fit. needs: of each rank that the limit is for."""
    totals = [sum(each.values()) for each in needs]
    return (sum(totals) if limit.is_shared else max(totals)) > MARGIN * limit.num_bytes


def refusal(
    plan: Plan, needs: Sequence[Mapping[str, int]], limit: Limit, offers: Sequence[tuple[Plan, int]]
) -> str:
    """The sentences that refuse a run. offers: plans that fit, with the predicted peak of a rank."""
    rank = max(range(len(needs)), key=lambda each: sum(needs[each].values()))
    kinds = ", ".join(f"{name} {format_bytes(size)}" for name, size in needs[rank].items())
    together = (
        f", the {format_count(len(needs), 'rank')} of the host {format_bytes(sum(sum(each.values()) for each in needs))}"
        if limit.is_shared and len(needs) > 1
        else ""
    )
    least = "" if "activations" in needs[rank] else ", without activations"
    would = ", ".join(f"{each} ({format_bytes(peak)} a rank)" for each, peak in offers)
    way = (
        f"Predicted to fit: {would}."
        if offers
        else "No plan nearby is predicted to fit: use more ranks, or a smaller model."
    )
    return (
        f"{plan} does not fit: its fullest rank holds {format_bytes(sum(needs[rank].values()))} at least ({kinds}{least}){together}, and {limit.source} "
        f"is {format_bytes(limit.num_bytes)}. {way} --overcommit (Trainer: overcommit=True) runs it all the same."
    )


def offers_for(
    job: Job, plan: Plan, limit: Limit, *, one_copy: bool, num_here: int, cache: Cache | None = None
) -> list[tuple[Plan, int]]:
    """Plans of as many ranks that are predicted to fit, simplest changes first, with the peak of their fullest rank.

    num_here: ranks that share a limit of a host.
    """
    readings, began = Readings(job, cache), time.monotonic()
    found: list[tuple[Plan, int]] = []
    for other in nearby(plan):
        if len(found) == OFFERS or time.monotonic() - began > SECONDS:
            break
        try:
            other.check_batch(job.batch_size)
            memories = predicted_ranks(readings, other, one_copy=one_copy and other.dp > 1)
        except MeshloomError:  # it cannot run this job
            continue
        peaks = [each.peak for each in memories]
        needed = sum(peaks) / len(peaks) * num_here if limit.is_shared else max(peaks)
        if needed <= limit.num_bytes:
            found.append((other, max(peaks)))
    return found


def predicted_ranks(readings: Readings, plan: Plan, *, one_copy: bool = False) -> tuple[RankMemory, ...]:
    """[rank along pp]: memory under a plan. Raises `CaptureError` or `PlanError` if it cannot run the job."""
    division = divided(readings, plan) if plan.tp > 1 else None
    stages = staged(readings, plan, offers=False) if plan.pp > 1 else None
    return ranks_of(readings, plan, division, stages, one_copy=one_copy)[1]


def nearby(plan: Plan) -> Iterator[Plan]:
    """Plans of as many ranks that hold less: state, gradients and parameters in slices; fewer activations; state
    elsewhere; the model in parts.

    >>> [str(each) for each in nearby(Plan(dp=2))][:4]
    ['dp=2,zero=1', 'dp=2,zero=2', 'dp=2,zero=3', 'dp=2,microbatches=2']
    """
    m = plan.microbatches
    changes: list[dict[str, Any]] = [{"zero": zero} for zero in (1, 2, 3) if plan.dp > 1 and zero > plan.zero]
    changes += [
        {"microbatches": 2 * m},
        {"microbatches": 4 * m},
        {"recompute": "selective"},
        {"recompute": "full"},
    ]
    changes += [{"offload": "optimizer"}] if plan.offload == "none" else []
    changes += [{"zero": 3, "microbatches": 4 * m}, {"zero": 3, "recompute": "full"}] if plan.dp > 1 else []
    size = plan.mesh.size
    for tp in (each for each in range(1, size + 1) if size % each == 0):
        for pp in (each for each in range(1, size // tp + 1) if size // tp % each == 0):
            dp = size // tp // pp
            shape = {"dp": dp, "pp": pp, "tp": tp, "zero": 0, "microbatches": max(m, 2 * pp if pp > 1 else 1)}
            if (dp, pp, tp) != (plan.dp, plan.pp, plan.tp) and tp * pp > 1:
                changes += [shape, {**shape, "recompute": "full"}]
                changes += [{**shape, "zero": zero} for zero in (1, 2, 3) if dp > 1]
    for change in changes:
        try:
            yield replace(plan, **change)
        except MeshloomError:  # settings that exclude each other
            continue


def _master_of(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.float()) if parameter.dtype == torch.bfloat16 else parameter


def _without_values(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=True)
