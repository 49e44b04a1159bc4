"""The ranks of a loop of one's own: each runs the whole script, and this process is one of them."""

from __future__ import annotations

import sys
from dataclasses import fields
from functools import cache
from typing import Any, NamedTuple

import torch

from meshloom.comm.group import Group
from meshloom.comm.objects import scatter_objects
from meshloom.comm.recording import RecordedGroup
from meshloom.core.errors import JobError, PlanError
from meshloom.core.modules.packages import is_users
from meshloom.core.plan import Plan
from meshloom.core.random import generators, put_generators
from meshloom.launch.environment import begun_as_rank, launched_plan, launched_rank
from meshloom.launch.opening import open_world
from meshloom.launch.world import LocalRank, World
from meshloom.loops.error_notes import note_of
from meshloom.loops.loop_lines import say

# What a plan may say of a loop of one's own. All else is what a loop does itself, or what only a job has.
OF_LOOPS = {
    "dp", "pp", "tp", "microbatches", "zero", "overlap", "bucket_bytes", "exchange", "reduce", "tp_placements", "memory_bytes", "cuts", "schedule",
    "virtual_stages", "sync_batch_norm",
}  # fmt: skip
_EXCHANGES = ("all_reduce", "ring")


class LoopRanks(NamedTuple):
    """The mesh of `plan` as this process sees it. own: its rank, with the groups that it communicates in."""

    plan: Plan
    world: World
    own: LocalRank

    @property
    def replicas(self) -> RecordedGroup:
        """The ranks along dp."""
        return self.own.groups["dp"]

    @property
    def replica(self) -> int:
        """The number of this rank's replica."""
        return self.own.place.dp

    @property
    def joined(self) -> Group | None:
        """The ranks along dp, where batch norm layers take their statistics over all shares together."""
        return self.own.statistics if self.plan.sync_batch_norm and self.plan.dp > 1 else None

    @property
    def everyone(self) -> Group:
        """All ranks, for what is small and not counted; tensors on the CPU."""
        return self.own.world

    @property
    def device(self) -> torch.device:
        return self.own.device


_OPENED: list[LoopRanks] = []


def ranks(plan: Plan | str | None = None) -> LoopRanks:
    """This process's ranks, which meet at the first call. plan: None takes the launcher's; several ranks without one are replicas. Where others have made
    them ranks after meshloom was imported, as Ray does, all go on with rank 0's draws.

    Raises `PlanError` for a plan that is not the one they met with, or that says what only a job has.
    """
    wanted = Plan.parse(plan) if isinstance(plan, str) else plan
    if not _OPENED:
        _OPENED.append(_open(wanted))
    found = _OPENED[0]
    if wanted is not None and wanted != found.plan:
        _check_started(wanted, found.plan.mesh.size)
        raise PlanError(
            f"The ranks of this script run under {found.plan}, and parallel() is given {wanted}. All modules of a script have one plan: "
            "say it once, on the command line (meshloom run --plan) or in the first parallel()."
        )
    return found


def has_ranks() -> bool:
    """Whether the ranks have met."""
    return bool(_OPENED)


def reached() -> None:
    """Note the script's line that runs now: its ranks have to do with each other there."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame and _OPENED:
        _OPENED[0].world.reached = frame.f_code.co_filename, frame.f_lineno


_is_users = cache(is_users)


def check_accelerator() -> None:
    """Raises `JobError` where accelerate's own `Accelerator` takes this rank for the only process."""
    state: Any = sys.modules.get("accelerate.state")
    found = ranks()
    if (
        state
        and state.AcceleratorState._shared_state
        and state.PartialState().process_index != found.own.rank
    ):
        raise JobError(
            f"accelerate's Accelerator takes each of {found.plan.mesh.size} ranks for the only process. Import it from meshloom: "
            "from meshloom.accelerate import Accelerator."
        )


def check_met() -> None:
    """At the end of a script. Raises `JobError` where several ranks were started, each of which has done all of it."""
    launched = launched_rank()
    if launched and launched.size > 1 and not has_ranks():
        raise JobError(
            f"Each of {launched.size} processes has run all of this script: nothing in it is parallel. Call ml.parallel(model) and ml.loader(loader), or take "
            "the class of a library that does (from meshloom.accelerate import Accelerator)."
        )


def leave_ranks(*, well: bool) -> None:
    """At the end of the script; well: it has come to its end. Otherwise what other ranks wait for fails there."""
    while _OPENED:
        world = _OPENED.pop().world
        world.close() if well else world.abort()


def _open(wanted: Plan | None) -> LoopRanks:
    launched = launched_rank()
    text = launched_plan()
    if wanted is None and text is not None:
        wanted = Plan.parse(text)
    if wanted is None:
        size = launched.size if launched else 1
        wanted = Plan(dp=size)
        if size > 1:
            say(f"{size} ranks and no plan: dp={size}")
    check_of_loops(wanted)
    _check_started(wanted, launched.size if launched else 1)
    world = open_world(wanted.mesh, ring=wanted.on_ring)
    world.note_of = note_of
    found = LoopRanks(wanted, world, world.local[0])
    if not begun_as_rank():  # so that nobody has seeded it
        states = [generators()] * wanted.mesh.size if world.main else None
        put_generators(scatter_objects(found.everyone, states))
    return found


def _check_started(plan: Plan, size: int) -> None:
    if plan.mesh.size > 1 and size == 1:
        raise PlanError(
            f"The plan {plan} has {plan.mesh.size} ranks, and this script is one process. Start it with "
            f"meshloom run SCRIPT.py --plan {plan}, or with torchrun --nproc-per-node {plan.mesh.size} SCRIPT.py."
        )


def check_of_loops(plan: Plan) -> None:
    """Raises `PlanError` for settings that a loop of one's own does not take from its plan."""
    plain = Plan(dp=plan.dp, pp=plan.pp, tp=plan.tp)
    said = [each.name for each in fields(plan) if getattr(plan, each.name) != getattr(plain, each.name)]
    refused = [name for name in said if name not in OF_LOOPS]
    if plan.exchange not in _EXCHANGES:
        refused.insert(0, "exchange")
    if refused:
        name = refused[0]
        raise PlanError(
            f"A loop of one's own takes no {name}={getattr(plan, name)} from its plan: its steps are the script's. Leave it out, "
            "or describe the training as a Job (docs/loops.md)."
        )
    if plan.zero == 3 and (plan.tp > 1 or plan.pp > 1):
        raise PlanError(
            "A loop of one's own has zero=3 with dp alone, and tp or pp divides each replica, too. Use zero=2, or leave tp and pp out."
        )
