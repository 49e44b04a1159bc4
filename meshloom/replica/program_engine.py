"""Runs programs captured from the loss: the engine of plans with tp, pp or recomputation, where a rank holds
its stages' shard of the model.

    capture the loss on one rank -> shard it over tp -> cut it into stages -> every rank releases what it does
    not hold
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.checkpoint.resuming import check_together
from meshloom.checkpoint.tensor_file import Stream
from meshloom.comm.group import Group
from meshloom.comm.objects import on_rank_0
from meshloom.comm.rank_context import RankContext
from meshloom.comm.simulated import simulated_groups
from meshloom.core.buffer_rules import rule_of
from meshloom.core.errors import CaptureError, DataError, JobError
from meshloom.core.job import Job, LossFunction, NamedParameters
from meshloom.core.losses.turns import LossTurn, OwnGradients
from meshloom.core.mesh import Axis
from meshloom.core.modules.compiled import compiled_notes, without_compilation
from meshloom.core.modules.named_leaves import named_leaves
from meshloom.core.moments.current_step import Moment
from meshloom.core.plan import Plan
from meshloom.data.chunks import Chunk
from meshloom.data.job_data import build_dataset
from meshloom.data.samples import reading_first
from meshloom.data.to_device import to_device
from meshloom.exchange.exchange import Emit, Exchange
from meshloom.exchange.units.unit_gathering import STEP
from meshloom.parameters.model import make_row_major
from meshloom.parameters.pipeline_ownership import PipelineOwnership, held
from meshloom.parameters.replica_check import first_difference_in_replica
from meshloom.parameters.shards import Shards
from meshloom.parameters.unfilled_model import UnfilledModel, take_share
from meshloom.pipeline.runtime.held_parameters import HeldParameters
from meshloom.pipeline.runtime.microbatches import Around, Microbatches
from meshloom.pipeline.runtime.recorder import Recorder
from meshloom.pipeline.runtime.run import BothListeners
from meshloom.pipeline.schedules.schedule import Schedule
from meshloom.pipeline.stages.program_store import ProgramStore
from meshloom.pipeline.stages.stages import Stage
from meshloom.program.capture.guarded_values import GuardedValue, check_step
from meshloom.program.capture.guards import Guards
from meshloom.program.cost.opaque_shares import check_divided
from meshloom.program.ir.batch_values import check_following
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.ir.written_parameters import named_buffers
from meshloom.program.opaque.operator import is_opaque, trained_writes
from meshloom.program.operators.fused_grad_accumulation import DirectAccumulator
from meshloom.program.operators.used_rows import UsedRows
from meshloom.program.run.compiler import Compiler
from meshloom.program.store.program_cache import ProgramCache
from meshloom.replica.buffers.merged_buffers import RunningStatistics
from meshloom.replica.buffers.norm_statistics import decays
from meshloom.replica.chunk_scope import ChunkScope
from meshloom.replica.engine import Engine
from meshloom.replica.gathered_tensors import GatheredTensors
from meshloom.replica.gradient_completion import GradientCompletion
from meshloom.replica.loss_sums import LossSums
from meshloom.replica.not_finite import locate_nan
from meshloom.replica.team_sums import TeamSums
from meshloom.telemetry.timings import Timings
from meshloom.telemetry.traffic import ExpectedBytes
from meshloom.tensor_parallel.division import Division


class ProgramEngine(Engine):
    """One rank's stages of `job`'s loss under `plan`, and their parameters and buffers."""

    def __init__(
        self, job: Job, plan: Plan, context: RankContext, *, dtype: torch.dtype | None = None, timings: Timings | None = None,
        stored: ProgramCache | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.context, self.job, self.dtype = plan, context, job, dtype
        self._timings = timings = timings or Timings()
        team = context.team or simulated_groups(1)[0]
        self.pp: Group = context.groups["pp"] if plan.pp > 1 else simulated_groups(1)[0]
        self.tp: Group | None = context.groups["tp"] if plan.tp > 1 else None
        if self.tp is not None:
            limits: Any = {"memory_bytes": plan.memory_bytes or None, "num_stages": plan.pp}
            given: Any = {"rules": job.rules, "placements": plan.tp_placements}
            self.division = Division(self.tp, timings=timings, stored=stored, **given, **limits)
        self.programs = ProgramStore(job, plan, team, self.division, dtype=dtype, timings=timings, stored=stored)  # fmt: skip
        self.cutter = self.programs.cutter
        self.team_sums = TeamSums(self.pp, self.tp)
        self.stages: tuple[Stage, ...] = ()  # of this rank, as first cut, of every loss
        self.ownership: PipelineOwnership
        self.microbatches: Microbatches
        self.losses = {name: each.loss for name, each in job.losses.items()} or {"": job.loss}
        self._compiled: list[str] = []  # modules that torch.compile would have compiled
        self.compiler = Compiler(context.device) if plan.compiles else None
        self._team = team
        self._model: nn.Module
        self._guards: dict[LossFunction, list[GuardedValue]] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._held: HeldParameters
        self.rows = UsedRows({}, context.device)  # which rows of tables with sparse gradients a step uses

    def open(
        self, model: nn.Module, scope: ChunkScope, unfilled: UnfilledModel | None = None, own: OwnGradients | None = None
    ) -> None:  # fmt: skip
        with self._timings.of("parts and waiting"):
            self._open(model, scope, unfilled, own)

    def _open(
        self, model: nn.Module, scope: ChunkScope, unfilled: UnfilledModel | None, own: OwnGradients | None
    ) -> None:
        self._compiled = without_compilation(model)
        world, size = self.context.world, self.plan.largest_share(self.job.batch_size)[0]
        with self._timings.of("first batches"):
            first = on_rank_0(world, lambda: self._first_batches(model, size), DataError)
        batches = first or []
        there = [to_device(each, self.context.device, self.dtype) for each in batches]
        with unfilled.standing_in() if unfilled and world.rank == 0 else nullcontext():
            stages = _captured(self, model, there, batches, own)
        here = [
            [each for each in of_loss if self.cutter.ranks[each.number] == self.pp.rank] for of_loss in stages
        ]
        self.stages = tuple(each for of_loss in here for each in of_loss)
        self._check_divided(model)
        self.writes_trained = any(trained_writes(each.program) for each in self.stages)
        self.ownership = PipelineOwnership(self.cutter.holders, self.pp)
        self.ownership.release(model)
        self.shards = Shards(self.programs.pieces, self.tp)
        take_share(model, self.shards, unfilled, world)
        make_row_major(model)
        self._model, self.runs_modules = model, bool(self.programs.opaque)
        self.is_unlike_training = self.programs.is_unlike_training
        self._guards = {
            each: Guards(each, model, self.programs.opaque).values for each in self.losses.values()
        }
        self._parameters = {name: each for name, each in model.named_parameters() if not each.is_meta}
        for by_stage, of_loss in zip(scope.statistics, here, strict=True):
            by_stage |= {each.number: _statistics_of(each, model, self) for each in of_loss}
        self._gathered = GatheredTensors(
            model, self.ownership, self.shards, self.pp, self.tp, self.context.device
        )

    def _first_batches(self, model: nn.Module, size: int) -> list[Any]:
        """One to capture the losses with, and two to compare with. Raises `CaptureError` for what changes as these are read."""
        dataset = build_dataset(self.job.data, self.job.seed)
        with closing(reading_first(self.job, dataset, size)) as reading:
            batches = list(islice(reading, 1))
            leaves = named_leaves(self.job.leaves, model)
            guards = [Guards(each, model, leaves) for each in self.losses.values()]
            batches += islice(reading, 2)
        for each in guards:
            each.check_reading(dataset, self.job.collate)
        return batches

    def _check_divided(self, model: nn.Module) -> None:
        """Raise `CaptureError` where leaves leave nothing to divide over tp, and no two stages have parameters."""
        sizes = {name: each.numel() for name, each in model.named_parameters()}
        stages = {self.cutter.holders.get(name) for name in sizes} - {None}
        if not (self.division and self.division.share_divided) and len(stages) <= 1:
            check_divided(self.plan, list(self.programs.opaque), sizes)

    @property
    def parameters(self) -> NamedParameters:
        return [
            (name, each)
            for name, each in self._parameters.items()
            if each.requires_grad and self.ownership.owns(name)
        ]

    @property
    def replicated(self) -> Sequence[str]:
        return [name for name, _ in self.parameters if name not in self.shards.pieces]

    @property
    def late(self) -> Sequence[str]:
        return [*self.ownership.lent, *self.programs.summed]

    @property
    def lent(self) -> Mapping[str, bool]:
        return {name: self.ownership.owns(name) for name in self.ownership.lent}

    @property
    def borrows(self) -> bool:
        return bool(self.ownership.lent)

    def watch_rows(self, tables: Mapping[str, int], device: torch.device) -> None:
        self.rows = UsedRows(tables, device)

    def used_rows(self, name: str) -> Tensor | None:
        return self.rows.of(name, self.shards.pieces.get(name), self.shards.rank)

    def connect(self, exchange: Exchange) -> ExitStack:
        self._exchange = exchange
        self._completion = GradientCompletion(
            self.parameters, self.ownership, self.shards, self.programs.summed, exchange.gradient_ready
        )
        # With a single chunk autograd already writes gradients in place.
        accumulator = DirectAccumulator(exchange.grad_buffer) if self.plan.num_chunks > 1 else None
        self._held = HeldParameters(self._parameters, exchange, self.context.readers)
        self.microbatches = Microbatches(
            self.programs, self._model, self._parameters, self.pp, self.tp, self.context.device, self._completion.backward_ended, accumulator,
            each_microbatch=exchange.each_chunk, units=self._held.units, used_rows=self.rows, compiler=self.compiler,
        )  # fmt: skip
        undo = self._completion.watch(self.microbatches.arrived)
        undo.enter_context(self.rows.watch(self._model, self.programs.opaque))
        return undo

    def turn_to(self, turn: LossTurn) -> None:
        self.programs.losses.loss = self.losses[turn.loss]

    def run(
        self, chunks: Sequence[Chunk], scope: ChunkScope, loss_sums: LossSums, recorder: Recorder | None = None
    ) -> None:  # fmt: skip
        self._exchange.begin_last_chunk()
        most = self._held.most(len(chunks))
        if chunks and stages_may_run_differently(self.plan, chunks[0].batch):
            self._exchange.wait_for_nothing()
        activity = self.context.activity
        activity.follow(self.microbatches.actions(len(chunks), most))
        check_step(self._guards[self.programs.losses.loss])
        batches = [scope.data(chunk) for chunk in chunks]
        for batch in batches:
            self.programs.ready(batch)
        for parameter in self._parameters.values():
            parameter.grad = None
        if self.rows.flags.numel():
            self.rows.begin()
        listener = BothListeners(activity, recorder) if recorder else activity
        finish, around = finish_of(chunks, scope, loss_sums), around_of(self.plan, chunks, scope)
        # On a communicator of its own: replicas may have started different numbers of gradient all-reduces.
        begin_sums = partial(_begin_sums, loss_sums, self.context.statistics, self.team_sums)
        if self.plan.pp == 1 and not self._exchange.each_chunk:
            finish = _then(finish, len(batches) - 1, begin_sums)
        with self.computing(STEP, idle=not batches):
            sent = self.microbatches.train(batches, most, finish, around, listener)
        self.team_sums.count(sent)
        self._completion.finish(
            self._parameters, partial(self.team_sums.add_up, "tp"), computed=bool(batches)
        )
        for axis in ("tp", "pp") if self.rows.flags.numel() else ():
            self.team_sums.add_up(axis, self.rows.flags.clamp_(max=1))
        if not loss_sums.started:
            begin_sums()
        self._exchange.end_chunks()

    def computing(self, kind: str, *, idle: bool = False) -> AbstractContextManager[None]:
        return self._held.computing(kind, idle=idle)

    def add_up(self, axis: Axis, sums: Tensor) -> None:
        self.team_sums.add_up(axis, sums)

    def evaluate(
        self, batch: Any, metric: LossFunction, moment: Moment, take: Callable[[Any], None]
    ) -> None:  # fmt: skip
        if metric in self._guards:
            check_step(self._guards[metric])
        self.programs.ready(batch, loss=metric, training=False)
        if metric not in self._guards:
            self._guards[metric] = Guards(metric, self._model, self.programs.opaque).values
        with moment.entered():
            self.team_sums.count(self.microbatches.evaluate(batch, metric, take))

    def refresh_borrowed(self) -> None:
        self.ownership.lend(self._parameters, self._held.apart(self.lent))

    def gather(self, mine: Callable[[Emit], None], take: Emit) -> None:
        self._gathered.gather(mine, take)

    def weights(self) -> Stream:
        return self._gathered.weights(self._held.slices)

    def locate_nan(self, chunks: Sequence[Chunk], scope: ChunkScope) -> list[Any] | None:
        batches = [scope.data(chunk) for chunk in chunks]
        return locate_nan(self._held, self._team, chunks, batches, scope, self.microbatches)

    def check_replicated(self) -> str | None:
        mine = {**self._held.kept(), **held(named_buffers(self._model))}
        return first_difference_in_replica(mine, self.shards, self._team, self.plan)

    def expected_bytes(self) -> ExpectedBytes:
        return self.team_sums.expected_bytes() + self.ownership.expected_bytes() + self._gathered.expected_bytes()  # fmt: skip

    @property
    def readings(self) -> str | None:
        return self.programs.told()

    @property
    def notes(self) -> list[str]:
        leaves = self.programs.opaque_notes()
        if leaves and self.division and (share := self.division.share_divided) < 0.5:
            leaves.append(f"tp={self.plan.tp} divides {share:.0%} of the parameters.")
        return [*compiled_notes([] if self.compiler else self._compiled), *leaves]

    @property
    def holders(self) -> Mapping[str, tuple[int, ...]] | None:
        return self.cutter.holders if self.plan.pp > 1 else None

    def schedule(self, num_microbatches: int) -> Schedule | None:
        return self.cutter.schedule(num_microbatches)


def _begin_sums(sums: LossSums, statistics: Group, team: TeamSums) -> None:
    """Ends the chunks of `sums`, adds them up over the replica, and starts their sum over replicas."""
    sums.close()
    if sums.told is not None:
        team.add_up("tp", sums.told)
    team.add_up("pp", sums.sums)  # known to the last stage's rank, zeros on the others
    sums.start(statistics)


def _then(
    finish: Callable[[int, Any], Tensor], last: int, begin: Callable[[], None]
) -> Callable[[int, Any], Tensor]:
    """`finish`, and after that of the last microbatch `begin`: before its backward."""

    def both(microbatch: int, returned: Any) -> Tensor:
        root = finish(microbatch, returned)
        if microbatch == last:
            begin()
        return root

    return both


def _captured(
    engine: ProgramEngine, model: nn.Module, there: list[Any], batches: list[Any], own: OwnGradients | None
) -> list[tuple[Stage, ...]]:
    """The stages of every loss. there: `batches` on the device, in the engine's precision."""
    world, programs, left = engine.context.world, engine.programs, len(engine.losses)
    stages: list[tuple[Stage, ...]] = []
    if engine.compiler:
        check_together(world, engine.compiler.check)
    for name, loss in engine.losses.items():
        programs.losses.loss, left = loss, left - 1
        with own.of(name) if own else nullcontext():
            opened = programs.open(there, world, model, own=next(iter(batches), None), losses_left=left)
        stages.append(opened)
        if len(stages) == 1:
            check = partial(_check_values, programs.others, there)
            on_rank_0(world, check, CaptureError)
    programs.losses.loss = engine.job.loss
    return stages


def _check_values(others: Mapping[str, str | None], batches: Sequence[Any]) -> None:
    """others: those of the program that was captured from the first of the batches."""
    check_following(others, leaves_of(batches[-1]).values)


def _statistics_of(stage: Stage, model: nn.Module, engine: ProgramEngine) -> RunningStatistics:
    program, shards, rules = stage.program, engine.shards, engine.job.buffers
    for name in program.changing:
        if callable(rule_of(name, rules)) and name in shards.pieces:
            raise JobError(
                f'Job(buffers=...) gives {name} a function, and {engine.plan} divides it. Declare "last", "sum" or ml.ema(decay), which go by elements.'
            )
    kept, named = decays(program.nodes), {each.value: name for name, each in program.buffers.items()}
    return RunningStatistics(
        model, engine.context.groups["dp"], num_chunks=engine.plan.microbatches, rules=rules, changing=stage.changing,
        decays={named[value]: each for value, each in kept.items() if value in named},
        opaque=[str(node.args[2]) for node in program.nodes if is_opaque(node)],
    )  # fmt: skip


def stages_may_run_differently(plan: Plan, batch: int) -> bool:
    """Whether replicas may run a rank's stages in different orders in a step on `batch` samples: several
    stages a rank, and different numbers of chunks."""
    if plan.num_stages == plan.pp:
        return False
    sizes, m = plan.sizes(batch), plan.microbatches
    counts = {sum(map(bool, sizes[start : start + m])) for start in range(0, len(sizes), m)}
    return plan.shares == "measured" or len(counts) > 1


def around_of(plan: Plan, chunks: Sequence[Chunk], scope: ChunkScope) -> Around:
    """The context of a stage's forward of a microbatch."""

    def around(stage: int, microbatch: int) -> AbstractContextManager[None]:
        return scope.forward(chunks[microbatch], stage=stage, observed=stage == plan.num_stages - 1)

    return around


def finish_of(
    chunks: Sequence[Chunk], scope: ChunkScope, loss_sums: LossSums
) -> Callable[[int, Any], Tensor]:
    """(microbatch, what the loss returned for it) -> the root of its backward, on the last stage."""

    def finish(microbatch: int, returned: Any) -> Tensor:
        root, loss, weight = loss_sums.add(returned, chunks[microbatch])
        scope.done(chunks[microbatch], weight, loss)
        return root

    return finish
