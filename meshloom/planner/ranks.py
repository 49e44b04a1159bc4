"""What each rank of a plan holds and sends in a step, by shapes alone, for any sharding and any stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from meshloom.comm.shm.native_engine import why_not
from meshloom.core.errors import PlanError
from meshloom.core.exchanges import holds_only_buckets
from meshloom.core.mesh import Axis
from meshloom.core.plan import Plan
from meshloom.exchange.buckets.gradient_bytes import held_gradients
from meshloom.optimizer.reach import OPTIMIZER_FACTOR
from meshloom.pipeline.schedules.schedule import Schedule
from meshloom.pipeline.stages.choose_cuts import CutChoice
from meshloom.pipeline.stages.plan_cuts import schedule_of
from meshloom.pipeline.stages.stage_cutter import stages_of_part
from meshloom.pipeline.stages.stage_traffic import sent_by_rank, sent_over_tp, traffic_of_ranks
from meshloom.pipeline.stages.stages import Stage, users_of
from meshloom.planner.divided import Divided
from meshloom.planner.memory.dry_run import DryChunks, DryStages, Gradients
from meshloom.planner.memory.rank_memory import (
    HeldBytes,
    RankMemory,
    has_buckets,
    memory_of_rank,
    state_by_place,
    with_gathered,
)
from meshloom.planner.memory.step_facts import StepFacts, facts_of
from meshloom.planner.memory.unit_bytes import unit_bytes
from meshloom.planner.readings import Readings
from meshloom.planner.staged_plan import StagePlan
from meshloom.program.cost.rates import rates_here
from meshloom.program.ir.program import Program
from meshloom.program.recompute.recompute import with_recomputation
from meshloom.replica.exchanges.sharing import shares_copies
from meshloom.tensor_parallel.partition import Partition
from meshloom.tensor_parallel.sent_bytes import sent_at_step_end


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """What the first rank along dp and tp holds and sends, of those at `pp`. num_bytes: axis -> bytes that it
    hands over in a step."""

    pp: int
    held: HeldBytes
    num_bytes: Mapping[Axis, int]


def sends_buckets(plan: Plan) -> bool:
    """Whether what ranks of the plan send along dp is known by shapes alone."""
    return plan.dp == 1 or holds_only_buckets(plan)


def shares_one_copy(plan: Plan, transport: str) -> bool:
    """Whether `meshloom train` on one host keeps one copy of parameters and state for all replicas, unless the job
    needs one each (`replica/exchanges/sharing.py`). transport: as asked for."""
    return shares_copies(plan) and transport == "auto" and not torch.cuda.is_available() and not why_not()


def shares_of(
    readings: Readings,
    plan: Plan,
    division: Divided | None,
    stages: StagePlan | None,
    *,
    batch_size: int | None = None,
    optimizer_factor: float = OPTIMIZER_FACTOR,
    one_copy: bool = False,
) -> tuple[RankShare, ...]:
    """`rank_shares` of a job, sharded and split into stages by its plan. batch_size: of the global batch;
    default: the job's."""
    sizes = plan.largest_share(batch_size or readings.job.batch_size)
    reading, stored = readings.of(sizes[0]), readings.stored
    program, rates = reading.program, rates_here(reading.program.device.type, plan.pp)
    choice, schedule = (stages.choice, stages.schedule) if stages else (None, None)

    def make() -> tuple[RankShare, ...]:
        part = division.part if division else None
        again = with_recomputation(program, plan.recompute, costs_of=reading.costs, rates=rates)
        return rank_shares(
            again, plan, len(sizes), part=part, choice=choice, schedule=schedule, optimizer_factor=optimizer_factor, one_copy=one_copy
        )  # fmt: skip

    with readings.timings.of("ranks"):
        if stored is None:
            return make()
        stage_of = [choice.stage_of[node.name] for node in program.nodes] if choice else None
        depends = {
            "plan": str(plan),
            "microbatches": len(sizes),
            "factor": optimizer_factor,
            "one_copy": one_copy,
            "rates": str(rates) if plan.recompute != "none" else "",
            "stages": stage_of,
            "schedule": str(schedule),
            **(division.depends if division else {}),
        }
        return stored.value("ranks", program, depends, tuple[RankShare, ...], make)


def rank_shares(
    program: Program,
    plan: Plan,
    num_microbatches: int,
    *,
    part: Partition | None = None,
    choice: CutChoice | None = None,
    schedule: Schedule | None = None,
    optimizer_factor: float = OPTIMIZER_FACTOR,
    one_copy: bool = False,
) -> tuple[RankShare, ...]:
    """[rank along pp]. program: of the largest microbatch, unsharded. part, choice: its sharding and stages,
    where the plan has tp and pp. schedule: of these stages; default: the plan's.

    num_microbatches: of a replica, all taken to be as large as the largest. optimizer_factor: bytes of
    optimizer state per byte of parameters. one_copy: replicas are ranks of one host that have parameters and
    state once; each is counted its share. Temporaries and the batch are not counted; activations as if nothing
    was recomputed; what is sent along dp only where `sends_buckets`. Raises `PlanError` for exchange=async.
    """
    if not plan.synchronous:
        raise PlanError(
            "What ranks of exchange=async hold is not known by shapes alone. Describe the plan of one worker, without exchange=async."
        )
    mine = replace(part.of(0).program, kept=program.kept) if part else program
    stage_of = choice.stage_of if choice else {node.name: 0 for node in program.nodes}
    stages = stages_of_part(mine, stage_of, part.of(0).routed if part else {}, plan.num_stages)
    schedule = schedule or schedule_of(plan, num_microbatches)
    dry = DryStages(
        plan.tp,
        gradients=_gradients(plan),
        in_units=plan.zero == 3 and not one_copy,
        split=bool(schedule.split),
    )
    ownership = {
        name: tuple(dict.fromkeys(schedule.ranks[stage] for stage in users))
        for name, users in users_of(stages).items()
    }
    between = traffic_of_ranks(
        [[each for stage in stages for each in stage.incoming]] * num_microbatches, schedule.ranks
    )
    at_the_end = {name for name, ranks in ownership.items() if len(ranks) > 1} | {
        *(part.summed if part else ())
    }
    shares: list[RankShare] = []
    for rank in range(plan.pp):
        own = [stage for stage in stages if schedule.ranks[stage.number] == rank]
        chunks = dry.chunks(own, schedule.actions[rank])
        over_tp = 0
        if part:
            # gradients that several ranks hold parts of are summed once a step by their owners
            owned = [name for name in part.summed if ownership[name][0] == rank]
            over_tp = num_microbatches * sum(sent_over_tp(own, 0).values())
            over_tp += sum(each.num_bytes for each in sent_at_step_end(part, owned))
        over_pp = sent_by_rank(between, rank)
        shares.append(
            _share(
                rank, own, chunks, ownership, plan, optimizer_factor, over_pp, over_tp, at_the_end, one_copy
            )
        )
    return tuple(shares)


def _gradients(plan: Plan) -> Gradients:
    """What becomes of them: programs add them up over chunks, modules copy each chunk's into buckets."""
    bucketed = has_buckets(plan)
    leave = bucketed and (plan.microbatches == 1 or plan.zero >= 2)
    if plan.divides_loss and plan.num_chunks > 1 and not leave:
        return "in buckets" if bucketed else "add up"
    return "leave" if bucketed else "stay"


def _share(
    rank: int, stages: Sequence[Stage], chunks: DryChunks, ownership: Mapping[str, Sequence[int]], plan: Plan, factor: float, over_pp: int, over_tp: int,
    at_the_end: Collection[str], one_copy: bool,
) -> RankShare:  # fmt: skip
    program = stages[0].program  # all of a rank's stages know all parameters
    held = {name: each.meta for name, each in program.parameters.items() if rank in ownership[name]}
    trained = {name: meta.num_bytes for name, meta in held.items() if meta.requires_grad}
    owned = sum(size for name, size in trained.items() if ownership[name][0] == rank)
    slices = plan.dp if one_copy else plan.mesh.num_slices
    per_replica = -(-owned // slices) if plan.zero or one_copy else owned
    # owners lend slices under zero=3, and borrowers return whole gradients
    lent_values = slices if plan.zero == 3 else 1
    lent = sum(
        -(-size * (len(ownership[name]) - 1) // lent_values) if ownership[name][0] == rank else size
        for name, size in trained.items()
        if len(ownership[name]) > 1
    )
    late = sum(size for name, size in trained.items() if ownership[name][0] == rank and name in at_the_end)
    # zero=2 sends the gradients of every chunk
    sent_gradients = late + (owned - late) * (plan.microbatches if plan.zero == 2 else 1)
    exchanged = (sent_gradients + per_replica if plan.zero else owned) if plan.dp > 1 else 0
    if one_copy or not sends_buckets(plan):
        exchanged = 0
    parameters = sum(meta.num_bytes for meta in held.values())
    own = [name for name in trained if ownership[name][0] == rank]
    gradients, on_the_way = held_gradients(plan, trained, own, at_the_end, one_copy=one_copy)
    full = 0
    if plan.zero == 3 and plan.dp > 1 and not one_copy:
        units = unit_bytes(held, plan.bucket_bytes)
        m = plan.microbatches
        parameters, full = -(-units.parameters // slices), units.full
        gradients, on_the_way = -(-units.trainable // slices), units.full_trainable
        borrowed = sum(trained.values()) - owned
        exchanged = units.sent(slices, m) - m * borrowed - (m - 1) * late
        exchanged += per_replica if plan.mesh.within else 0  # added up with those of equal slices
    sent: dict[Axis, int] = {"dp": exchanged, "pp": over_pp + lent, "tp": over_tp}
    return RankShare(
        pp=rank,
        held=HeldBytes(
            parameters=-(-parameters // plan.dp) if one_copy else parameters,
            gradients=gradients,
            **state_by_place(plan, round(factor * per_replica)),
            buffers=sum(
                each.meta.num_bytes for name, each in program.buffers.items() if rank in ownership[name]
            ),
            kept=chunks.kept,
            computing=chunks.most[0],
            temporaries=chunks.most[1],
            trained=owned,
            on_the_way=on_the_way,
            full=full,
        ),
        num_bytes={axis: count for axis, count in sent.items() if count},
    )


def ranks_of(
    readings: Readings,
    plan: Plan,
    division: Divided | None,
    stages: StagePlan | None,
    *,
    batch_size: int | None = None,
    one_copy: bool = False,
) -> tuple[tuple[RankShare, ...], tuple[RankMemory, ...]]:
    """[rank along pp] what ranks hold and send, as `shares_of` says, and the memory that they need; of those that
    are first along dp and tp. Raises `CaptureError` if the loss cannot be captured."""
    facts = step_facts(readings, plan, batch_size=batch_size)
    shares = shares_of(
        readings, plan, division, stages, batch_size=batch_size, optimizer_factor=facts.optimizer_factor, one_copy=one_copy
    )  # fmt: skip
    if readings.gathered:
        shares = tuple(
            replace(each, held=with_gathered(each.held, plan, readings.gathered, facts.optimizer_factor))
            for each in shares
        )
    sizes = plan.largest_share(batch_size or readings.job.batch_size)
    # what is copied from other devices lies on the host
    copies = readings.job.checkpoint == "background" and readings.of(sizes[0]).program.device.type == "cpu"
    memories = tuple(
        memory_of_rank(
            plan,
            each.held,
            facts,
            microbatches=len(sizes),
            first=each.pp == 0,
            one_copy=one_copy,
            background=copies,
        )
        for each in shares
    )
    return shares, memories


def step_facts(readings: Readings, plan: Plan, *, batch_size: int | None = None) -> StepFacts:
    """Of the largest microbatch under a plan. Raises `CaptureError` if the loss cannot be captured."""
    job, sizes = readings.job, plan.largest_share(batch_size or readings.job.batch_size)
    reading = readings.of(sizes[0])
    settings: Any = {"microbatches": len(sizes), "bucketed": has_buckets(plan)}
    make = partial(facts_of, reading.program, job.optimizer, **settings)
    with readings.timings.of("memory of a step"):
        stored, parts = readings.stored, readings.optimizer_key
        if stored is None or parts is None:
            facts = make()
        else:
            facts = stored.value("facts", reading.program, {**parts, **settings}, StepFacts, make)
    comparison = readings.comparison_bytes(sizes[0]) if plan.divides_loss else 0
    return replace(facts, comparison=comparison)
