"""Refuses a run that cannot fit into memory, before it takes any for training.

Two looks, both by shapes alone: when the model is known, at parameters, gradients and optimizer state; where the loss
is captured (tp, pp), also when a rank knows its part of it, at what that saves from forward to backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch

from meshloom.comm.objects import collect, share
from meshloom.core.cache import Cache
from meshloom.core.errors import PlanError
from meshloom.core.job import NamedParameters
from meshloom.core.plan import Plan
from meshloom.core.units import format_bytes, format_count
from meshloom.launch.allocator import return_freed_memory
from meshloom.launch.environment import opened_cache
from meshloom.launch.transport import host_identity
from meshloom.machine.host_memory import free_bytes, total_bytes
from meshloom.pipeline.schedules.check import held_by_stage
from meshloom.pipeline.stages.stages import Stage
from meshloom.planner.fitting import (
    MARGIN,
    Limit,
    StateBytes,
    least_bytes,
    offers_for,
    refusal,
    state_bytes,
    too_much,
)
from meshloom.planner.memory.dry_run import DryStages
from meshloom.planner.rehearsal.held import held_by
from meshloom.program.ir.program import Program
from meshloom.replica.loss_stages import Stages
from meshloom.replica.prepare import prepare
from meshloom.replica.replica import Replica

# ranks keep freed memory for the next step where the host has so many times what they hold at least
KEPT_WITHIN = 4
MOST_STATE = 4.0  # bytes of state per byte of parameters that hardly any optimizer exceeds


def prepare_if_it_fits(replica: Replica, *, overcommit: bool, cache: str) -> None:
    """`prepare`, unless its plan cannot fit. overcommit: it is not looked at. cache: as for `Trainer`, of
    captured losses, for plans that would fit. Raises `PlanError`."""
    least = _Least(replica)
    choose_allocation(replica, least)
    kept = None if overcommit else opened_cache(cache)
    if not overcommit:
        check_model_fits(replica, least, cache=kept)
        if replica.plan.offload != "none" and replica.context.device.type != "cpu":
            check_host_fits(replica)
    prepare(replica)
    if not overcommit and replica.inner != replica.plan:  # more than was asked about
        check_model_fits(replica, _Least(replica), cache=kept)
    if not overcommit:
        check_part_fits(replica, cache=kept)


class _Least:
    """What a rank holds at least, by kind."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica  # and no parameters, which it lets go of

    def of(self, num_here: int, limit: int) -> Mapping[str, int]:
        """Exact where `num_here` ranks might exceed `limit` bytes, else more."""
        trained = sum(each.nbytes for each in self._replica.model.parameters() if each.requires_grad)
        state = int(MOST_STATE * trained)
        most = self._with(StateBytes(total=state, gathered=trained, of_gathered=state))
        return most if num_here * sum(most.values()) <= limit else self._exact

    @cached_property
    def _exact(self) -> Mapping[str, int]:
        return self._with(state_bytes(self._replica.job, self._named()) or StateBytes(total=0))

    def _with(self, state: StateBytes) -> Mapping[str, int]:
        return least_bytes(self._replica.inner, self._named(), state, one_copy=self._replica.may_share)

    def _named(self) -> NamedParameters:
        return list(self._replica.model.named_parameters())


def choose_allocation(replica: Replica, least: _Least) -> None:
    """On CPUs: freed memory is returned to the system, and no longer kept for the next step, where the ranks of this
    host hold more than a quarter of its free memory anyway."""
    here: list[str] = collect(replica.context.world, host_identity())
    if replica.context.device.type != "cpu":
        return
    num_here, limit = here.count(host_identity()), free_bytes() // KEPT_WITHIN
    if num_here * sum(least.of(num_here, limit).values()) > limit:
        return_freed_memory()


def check_model_fits(replica: Replica, least: _Least, *, cache: Cache | None) -> None:
    """Before anything is filled: the least that ranks hold."""
    one_copy, limit = replica.may_share, limit_of(replica.plan, replica.context.device)
    together = replica.plan.mesh.size if limit.is_shared else 1
    needs = least.of(together, limit.num_bytes)
    if together * sum(needs.values()) <= limit.num_bytes:
        needs = {}
    _refuse(replica, needs, limit, one_copy=one_copy, cache=cache)


def check_host_fits(replica: Replica) -> None:
    """Beside GPUs: state that is offloaded to the memory of the host. Raises `PlanError`."""
    named, in_memory = list(replica.model.named_parameters()), replace(replica.plan, offload="none")
    state = state_bytes(replica.job, named) or StateBytes(total=0)
    mine = least_bytes(in_memory, named, state, one_copy=replica.may_share)["optimizer"], total_bytes()
    everyone: list[tuple[str, int, int]] = collect(replica.context.world, [host_identity(), *mine])
    for host in dict.fromkeys(host for host, _, _ in everyone):
        here = [(held, there) for each, held, there in everyone if each == host]
        held, there = sum(each for each, _ in here), here[0][1]
        if held > MARGIN * there:
            raise PlanError(
                f"{replica.plan} does not fit: {format_count(len(here), 'rank')} of a host hold at least {format_bytes(held)} of optimizer state in its memory, "
                f"which is {format_bytes(there)}. Use zero=1 over more replicas, more hosts, or leave offload out. --overcommit (Trainer: overcommit=True) runs it "
                "all the same."
            )


def check_part_fits(replica: Replica, *, cache: Cache | None) -> None:
    """Before the first step of a rank that knows its part of a captured loss: with activations."""
    plan, stages = replica.plan, replica.engine.stages
    if not stages.cut:
        return
    limit = limit_of(plan, replica.context.device)
    parameters = list(replica.model.named_parameters())
    trained = sum(each.nbytes for _, each in parameters if each.requires_grad and not each.is_meta)
    held = held_by(replica, 0, MOST_STATE)
    upper = _most_by_stage(stages, lambda stage: _results(stage.program))
    needs: Mapping[str, int] = {}
    if (held.total + _in_flight(stages, plan, upper)) * (
        plan.mesh.size if limit.is_shared else 1
    ) > limit.num_bytes:
        whole = sum(each.nbytes for _, each in parameters if each.requires_grad)
        state = state_bytes(replica.job, parameters) or StateBytes(total=0)
        held = held_by(replica, 0, state.total / whole if whole and trained else 0.0)
        rank = replica.context.place.tp
        in_units = plan.zero == 3 and replica.exchange.ownership.memory != "shared"
        dry = DryStages(plan.tp, rank, in_units=in_units)
        kept = _in_flight(stages, plan, _most_by_stage(stages, dry.kept))
        needs = {
            "parameters": held.parameters + held.full,
            "gradients": held.gradients + held.on_the_way,
            "optimizer": held.optimizer,
            "activations": kept,
        }
    _refuse(replica, needs, limit, one_copy=replica.exchange.ownership.memory == "shared", cache=cache)


def limit_of(plan: Plan, device: torch.device) -> Limit:
    """Of a rank: the plan's, the GPU's memory; else that of the host, for all of its ranks together."""
    if plan.memory_bytes:
        return Limit(num_bytes=plan.memory_bytes, source="the limit of a rank (memory_bytes)")
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return Limit(num_bytes=int(total), source=f"the memory of {device}")
    return Limit(num_bytes=total_bytes(), source="the memory of this host", is_shared=True)


def _refuse(
    replica: Replica, needs: Mapping[str, int], limit: Limit, *, one_copy: bool, cache: Cache | None
) -> None:
    """All ranks decide alike, by what each of them needs; {}: it fits for sure."""
    world = replica.context.world
    everyone: list[tuple[str, Mapping[str, int]]] = collect(world, [host_identity(), dict(needs)])
    mine = host_identity()
    here = [theirs for host, theirs in everyone if host == mine and theirs]
    problem = refusal(replica.plan, here, limit, ()) if here and too_much(here, limit) else None
    problems: Sequence[str | None] = collect(world, problem)
    if not any(problems):
        return
    text: str | None = None
    if world.rank == 0:
        text = next(each for each in problems if each)
        if problem:
            offers = offers_for(
                replica.job, replica.plan, limit, one_copy=one_copy, num_here=len(here), cache=cache
            )
            text = refusal(replica.plan, here, limit, offers)
    text = share(world, text)
    raise PlanError(f"{text} (Beyond the limit by less than {MARGIN - 1:.0%} is let through.)")


def _most_by_stage(stages: Stages, num_bytes: Callable[[Stage], int]) -> dict[int, int]:
    """Of this rank's stages, whichever loss has most in them."""
    most: dict[int, int] = {}
    for stage in stages.cut:
        most[stage.number] = max(most.get(stage.number, 0), num_bytes(stage))
    return most


def _in_flight(stages: Stages, plan: Plan, kept: Mapping[int, int]) -> int:
    """Most bytes saved at one time. kept: of a microbatch, by this rank's stages."""
    schedule = stages.schedule(plan.microbatches)
    return max(
        sum(size * moment[stage] for stage, size in kept.items()) for moment in held_by_stage(schedule)
    )


def _results(program: Program) -> int:
    """Bytes of all results of a program: more than it can save."""
    return 2 * sum(meta.num_bytes for node in program.nodes for meta in node.outputs)
