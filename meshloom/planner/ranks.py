"""What each rank of a plan holds and sends in a step, by shapes alone, for any sharding and any stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from meshloom.core.errors import PlanError
from meshloom.core.exchanges import holds_only_buckets
from meshloom.core.mesh import Axis
from meshloom.core.plan import Plan
from meshloom.exchange.buckets.gradient_bytes import held_gradients
from meshloom.pipeline.schedules.check import held_by_stage
from meshloom.pipeline.stages.choose_cuts import CutChoice
from meshloom.pipeline.stages.plan_cuts import schedule_of
from meshloom.pipeline.stages.stage_cutter import stages_of_part
from meshloom.pipeline.stages.stage_traffic import sent_by_rank, sent_over_tp, traffic_of_ranks
from meshloom.pipeline.stages.stages import Stage, users_of
from meshloom.planner.divided import Divided
from meshloom.planner.memory.memory import OPTIMIZER_FACTOR
from meshloom.planner.memory.stage_kept import kept_bytes_of
from meshloom.planner.memory.unit_bytes import unit_bytes
from meshloom.planner.readings import Readings
from meshloom.planner.rehearsal.rehearsal import HeldBytes
from meshloom.planner.staged_plan import StagePlan
from meshloom.program.ir.program import Program
from meshloom.tensor_parallel.partition import Partition
from meshloom.tensor_parallel.sent_bytes import sent_at_step_end


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """What the first rank along dp and tp holds and sends, of those at `pp`. num_bytes: axis -> bytes that it
    hands over in a step."""

    pp: int
    held: HeldBytes
    num_bytes: Mapping[Axis, int]


def copied_by(held: HeldBytes, plan: Plan, *, one_copy: bool = False) -> int:
    """Bytes of host memory for what a rank copies for a checkpoint in the background: its part of the state."""
    parameters = held.parameters if one_copy or plan.zero == 3 else -(-held.parameters // plan.dp)
    state = held.optimizer if one_copy or plan.zero else -(-held.optimizer // plan.dp)
    return parameters + state + held.buffers


def has_shares(plan: Plan) -> bool:
    """Whether `rank_shares` can compute what ranks of the plan hold and send."""
    return plan.recompute == "none" and holds_only_buckets(plan)


def shares_of(
    readings: Readings,
    plan: Plan,
    division: Divided | None,
    stages: StagePlan | None,
    *,
    batch_size: int | None = None,
    optimizer_factor: float = OPTIMIZER_FACTOR,
) -> tuple[RankShare, ...]:
    """`rank_shares` of a job, sharded and split into stages by its plan. batch_size: of the global batch;
    default: the job's."""
    sizes = plan.largest_share(batch_size or readings.job.batch_size)
    program, stored = readings.of(sizes[0]).program, readings.stored
    choice = stages.choice if stages else None

    def make() -> tuple[RankShare, ...]:
        part = division.part if division else None
        return rank_shares(
            program, plan, len(sizes), part=part, choice=choice, optimizer_factor=optimizer_factor
        )

    with readings.timings.of("ranks"):
        if stored is None:
            return make()
        stage_of = [choice.stage_of[node.name] for node in program.nodes] if choice else None
        depends = {
            "plan": str(plan),
            "microbatches": len(sizes),
            "factor": optimizer_factor,
            "stages": stage_of,
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
    optimizer_factor: float = OPTIMIZER_FACTOR,
) -> tuple[RankShare, ...]:
    """[rank along pp]. program: of the largest microbatch, unsharded. part, choice: its sharding and stages,
    where the plan has tp and pp.

    num_microbatches: of a replica, all taken to be as large as the largest. optimizer_factor: bytes of
    optimizer state per byte of parameters. Temporaries and the batch are not counted, nor memory of an
    exchange other than `all_reduce`. Raises `PlanError` for plans that recompute activations or replace the
    all-reduce.
    """
    if not has_shares(plan):
        raise PlanError(
            "What ranks hold and send is known by shapes alone where exchange=all_reduce and nothing is recomputed or compressed."
        )
    mine = part.of(0).program if part else program
    stage_of = choice.stage_of if choice else {node.name: 0 for node in program.nodes}
    stages = stages_of_part(mine, stage_of, part.of(0).routed if part else {}, plan.num_stages)
    kept = [kept_bytes_of(stage, plan.tp) for stage in stages]
    schedule = schedule_of(plan, num_microbatches)
    moments = held_by_stage(schedule)
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
        most = max(sum(kept[stage.number] * moment[stage.number] for stage in own) for moment in moments)
        over_tp = 0
        if part:
            # gradients that several ranks hold parts of are summed once a step by their owners
            owned = [name for name in part.summed if ownership[name][0] == rank]
            over_tp = num_microbatches * sum(sent_over_tp(own, 0).values())
            over_tp += sum(each.num_bytes for each in sent_at_step_end(part, owned))
        over_pp = sent_by_rank(between, rank)
        shares.append(
            _share(rank, own, most, ownership, plan, optimizer_factor, over_pp, over_tp, at_the_end)
        )
    return tuple(shares)


def _share(
    rank: int, stages: Sequence[Stage], kept: int, ownership: Mapping[str, Sequence[int]], plan: Plan, factor: float, over_pp: int, over_tp: int,
    at_the_end: Collection[str],
) -> RankShare:  # fmt: skip
    program = stages[0].program  # all of a rank's stages know all parameters
    held = {name: each.meta for name, each in program.parameters.items() if rank in ownership[name]}
    trained = {name: meta.num_bytes for name, meta in held.items() if meta.requires_grad}
    owned = sum(size for name, size in trained.items() if ownership[name][0] == rank)
    per_replica = -(-owned // plan.mesh.num_slices) if plan.zero else owned
    # owners lend slices under zero=3, and borrowers return whole gradients
    lent_values = plan.mesh.num_slices if plan.zero == 3 else 1
    lent = sum(
        -(-size * (len(ownership[name]) - 1) // lent_values) if ownership[name][0] == rank else size
        for name, size in trained.items()
        if len(ownership[name]) > 1
    )
    late = sum(size for name, size in trained.items() if ownership[name][0] == rank and name in at_the_end)
    # zero=2 sends the gradients of every chunk
    sent_gradients = late + (owned - late) * (plan.microbatches if plan.zero == 2 else 1)
    exchanged = (sent_gradients + per_replica if plan.zero else owned) if plan.dp > 1 else 0
    parameters = sum(meta.num_bytes for meta in held.values())
    own = [name for name in trained if ownership[name][0] == rank]
    gradients = held_gradients(plan, trained, own, at_the_end)
    if plan.zero == 3 and plan.dp > 1:
        units = unit_bytes(held, plan.bucket_bytes)
        size, m = plan.mesh.num_slices, plan.microbatches
        parameters, gradients = units.held_parameters(size), units.held_gradients(size)
        borrowed = sum(trained.values()) - owned
        exchanged = units.sent(size, m) - m * borrowed - (m - 1) * late
        exchanged += per_replica if plan.mesh.within else 0  # added up with those of equal slices
    sent: dict[Axis, int] = {"dp": exchanged, "pp": over_pp + lent, "tp": over_tp}
    return RankShare(
        pp=rank,
        held=HeldBytes(
            parameters=parameters,
            gradients=gradients,
            optimizer=round(factor * per_replica),
            buffers=sum(
                each.meta.num_bytes for name, each in program.buffers.items() if rank in ownership[name]
            ),
            kept=kept,
        ),
        num_bytes={axis: count for axis, count in sent.items() if count},
    )
