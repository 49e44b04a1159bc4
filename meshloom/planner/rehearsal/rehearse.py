"""Runs a few steps of a plan with all its ranks in this process, and records what each rank does.

Everything runs as in training: the same sharding, stages, schedule, buckets and optimizer, from the same
decisions. Only the communication is left out; its bytes are counted. Ranks take turns, each with its own
clock (`own_clock.py`), so one core suffices to find out what each of many ranks computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from meshloom.comm.group import Group
from meshloom.comm.turns import Turns
from meshloom.core.cache import Cache
from meshloom.core.errors import PlanError
from meshloom.core.exchange_refusals import check_exchange
from meshloom.core.job import Job
from meshloom.core.mesh import Mesh
from meshloom.core.plan import Plan
from meshloom.core.random import preserved_draws
from meshloom.core.units import format_bytes
from meshloom.data.chunks import Chunk
from meshloom.data.job_data import open_reader
from meshloom.data.team_data import open_team_reader
from meshloom.launch.one_process import simulated_ranks
from meshloom.launch.world import ALONG_DP, CARRIES_TENSORS, LocalRank, Use
from meshloom.machine.host_memory import free_bytes
from meshloom.optimizer.reach import OPTIMIZER_FACTOR
from meshloom.pipeline.runtime.recorder import Recorder
from meshloom.planner.memory.saved_bytes import SavedBytes
from meshloom.planner.rehearsal.held import held_by
from meshloom.planner.rehearsal.own_clock import CommonMemory, OwnClock, RehearsedGroup
from meshloom.planner.rehearsal.rehearsal import RankStep, Rehearsal
from meshloom.program.store.program_cache import ProgramCache
from meshloom.replica.prepare import prepare
from meshloom.replica.replica import Replica
from meshloom.replica.step_checks import SharedWriteError
from meshloom.telemetry.timings import Timings

T = TypeVar("T")
WARM_UP_STEPS = 2  # optimizer state is made in the first, memory is touched, kernels are chosen
STEPS = (3, 15)  # least and most that count
SECONDS = 0.6  # of one rank's own clock, after which there are enough


def check_plan(job: Job, plan: Plan) -> None:
    """Raises `PlanError` for what can be checked before anything is measured or run: no common steps, or too
    few samples."""
    if not plan.synchronous:
        raise PlanError(
            "exchange=async has no steps that all workers take together, so none can be priced. Use the virtual clock: meshloom train."
        )
    plan.check_batch(job.batch_size)
    check_exchange(job, plan)


def rehearse(
    job: Job,
    plan: Plan,
    *,
    threads: int,
    common_memory: bool,
    optimizer_factor: float = OPTIMIZER_FACTOR,
    cache: Cache | None = None,
    timings: Timings | None = None,
    share: bool = True,
) -> Rehearsal:
    """Steps of `plan` on CPUs, each rank with so many threads.

    common_memory: ranks along dp are processes of one host that share memory. optimizer_factor: bytes of
    optimizer state per byte of parameters. cache: of captured losses and choices, from earlier plans and runs. timings: of the first
    rank's start. share: whether replicas may have one copy of the parameters, unless forwards write them.

    Raises `PlanError` if the plan cannot run this job or the ranks do not fit into this process, and the
    job's own errors.
    """
    check_plan(job, plan)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with preserved_draws(), _ranks(job, plan, common_memory, cache, timings, share) as ranks:
            timed = [_Timed(cycle=plan.local_steps) for _ in ranks.all]
            ranks.run(lambda rank: _take_part(job, plan, rank, timed))
            replicas = [rank.replica for rank in ranks.all]
            return Rehearsal(
                plan=plan,
                threads=threads,
                places=tuple(rank.context.place for rank in ranks.all),
                steps=tuple(zip(*(each.steps for each in timed), strict=True)),
                held=tuple(
                    held_by(replica, each.kept, optimizer_factor)
                    for replica, each in zip(replicas, timed, strict=True)
                ),
                schedule=replicas[0].engine.stages.schedule(timed[0].num_filled)
                if replicas[0].inner.pp > 1
                else None,
                one_copy=replicas[0].exchange.ownership.memory == "shared",
                ran=replicas[0].inner,
            )
    except SharedWriteError:
        pass
    finally:
        torch.set_num_threads(before)
    return rehearse(
        job,
        plan,
        threads=threads,
        common_memory=common_memory,
        optimizer_factor=optimizer_factor,
        cache=cache,
        timings=timings,
        share=False,
    )


@dataclass(kw_only=True)
class RehearsedRank:
    """A rank, its clock, and its replica."""

    context: LocalRank
    clock: OwnClock
    replica: Replica = field(init=False)


@dataclass(kw_only=True)
class _Timed:
    """A rank's steps. cycle: after how many of them they repeat. num_filled: its chunks with samples. kept:
    bytes saved for backward."""

    cycle: int
    num_filled: int = 0
    kept: int = 0
    steps: list[RankStep] = field(default_factory=list)

    def are_enough(self, number: int) -> bool:
        """Whether the first so many steps suffice."""
        least, most = (each * self.cycle for each in STEPS)
        if number % self.cycle or number < least:
            return False
        return number >= most or sum(each.seconds for each in self.steps[:number]) >= SECONDS


class _Ranks:
    """All ranks of a plan, in turns."""

    def __init__(self, ranks: Sequence[RehearsedRank], turns: Turns) -> None:
        self.all = ranks
        self._turns = turns

    def run(self, function: Callable[[RehearsedRank], T]) -> list[T]:
        """What it returns for each rank, in whose thread it runs."""
        return self._turns.run([partial(function, rank) for rank in self.all])


@contextmanager
def _ranks(
    job: Job, plan: Plan, common_memory: bool, cache: Cache | None, timings: Timings | None, share: bool
) -> Iterator[_Ranks]:
    turns = Turns()
    ranks = _Ranks(rehearsed_ranks(plan.mesh, common_memory), turns)
    try:
        for rank in ranks.all:
            stored = ProgramCache(cache) if cache is not None and rank.context.rank == 0 else None
            first = timings if rank.context.rank == 0 else None
            rank.replica = Replica(job, plan, rank.context, share=share, stored=stored, timings=first)
            rank.replica.sums.num_ranks = 1  # what is added up stays this rank's own
            _check_room(rank.replica, plan.mesh.size - rank.context.rank)
        ranks.run(lambda rank: prepare(rank.replica))
        yield ranks
    finally:
        turns.close()
        for rank in ranks.all:
            if hasattr(rank, "replica"):
                rank.replica.close()


def rehearsed_ranks(mesh: Mesh, common_memory: bool) -> list[RehearsedRank]:
    """Ranks that take turns in this process, and whose groups carry no tensors."""
    cpu = torch.device("cpu")
    clocks = [OwnClock(cpu) for _ in range(mesh.size)]

    def wrap(groups: Sequence[Group], members: Sequence[int], use: Use) -> Sequence[Group]:
        if use not in CARRIES_TENSORS:
            return groups
        axis = "dp" if use in ALONG_DP else use
        common = CommonMemory(len(members)) if common_memory else None
        return [
            RehearsedGroup(group, axis, clocks[rank], common, members)
            for rank, group in zip(members, groups, strict=True)
        ]

    contexts = simulated_ranks(mesh, [cpu] * mesh.size, wrap)
    return [
        RehearsedRank(context=context, clock=clock) for context, clock in zip(contexts, clocks, strict=True)
    ]


def _take_part(job: Job, plan: Plan, rank: RehearsedRank, timed: Sequence[_Timed]) -> None:
    """All steps of one rank, in one thread: a thread has its own kernels and thread pools. timed: [rank]."""
    mine = timed[rank.context.rank]
    chunks = _read(job, plan, rank)
    mine.num_filled = sum(1 for chunk in chunks if chunk.samples)
    mine.kept = _watched_step(rank, chunks)
    for step in range(1, WARM_UP_STEPS):
        rank.replica.step(step, chunks)
    number = WARM_UP_STEPS
    while not timed[0].are_enough(len(mine.steps)):
        mine.steps.append(_timed_step(rank, number, chunks))
        rank.context.world.barrier().wait()  # so that all ranks decide by the same steps
        number += 1


def _read(job: Job, plan: Plan, rank: RehearsedRank) -> list[Chunk]:
    """The rank's share of the first batch."""
    context = rank.context
    if context.team is None:
        reader = open_reader(job, plan, context.readers, 0, 1)
    else:
        reader = open_team_reader(job, plan, context.readers, context.team, 0, 1)
    try:
        return reader.read(0)
    finally:
        reader.close()


def _watched_step(rank: RehearsedRank, chunks: Sequence[Chunk]) -> int:
    """The first step; returns the most bytes that were saved for backward in it."""
    rank.clock.begin()
    with SavedBytes([*rank.replica.model.parameters(), *rank.replica.model.buffers()]) as kept:
        rank.replica.step(0, chunks)
    return kept.most


def _timed_step(rank: RehearsedRank, number: int, chunks: Sequence[Chunk]) -> RankStep:
    replica = rank.replica
    rank.clock.begin()
    recorder = replica.recorder = Recorder(rank.context.device, rank.clock.nanoseconds)
    replica.step(number, chunks)
    rank.clock.stop()
    seconds, spans = rank.clock.seconds, recorder.take()
    replica.recorder = None
    return RankStep(seconds=seconds, spans=spans, calls=tuple(rank.clock.calls))


def _check_room(replica: Replica, num_ranks: int) -> None:
    """Raises `PlanError` if there is no memory for so many ranks, including this one, which has built its
    model. Each builds the full model at first."""
    # with gradients and an optimizer's two averages, unless these are on a disk
    num_bytes = (4 if replica.plan.offload == "none" else 2) * sum(
        each.nbytes for each in replica.model.parameters()
    )
    if num_bytes * num_ranks > free_bytes():
        raise PlanError(
            f"{replica.plan} cannot be rehearsed here: {num_ranks} ranks hold up to {format_bytes(num_bytes)} each in this process, and {format_bytes(free_bytes())} "
            "of memory are free. Price plans of fewer ranks, or a model with fewer layers."
        )
