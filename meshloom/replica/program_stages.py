"""Stages that run programs captured from the loss: those of plans with tp, pp or recomputation, where a rank holds
its shard of the parameters of its stages.

    capture the loss on one rank -> shard it over tp -> cut it into stages -> every rank releases what it does
    not hold
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.checkpoint.resuming import check_together
from meshloom.comm.group import Group
from meshloom.comm.objects import on_rank_0
from meshloom.comm.pieces import Pieces
from meshloom.comm.rank_context import RankContext
from meshloom.comm.simulated import simulated_groups
from meshloom.core.buffer_rules import rule_of
from meshloom.core.errors import CaptureError, DataError, JobError
from meshloom.core.job import Job, LossFunction, NamedParameters
from meshloom.core.modules.compiled import compiled_notes, without_compilation
from meshloom.core.modules.named_leaves import named_leaves
from meshloom.core.moments.current_step import Moment
from meshloom.core.plan import Plan
from meshloom.data.chunks import Chunk
from meshloom.data.job_data import build_dataset
from meshloom.data.samples import reading_first
from meshloom.data.to_device import to_device
from meshloom.exchange.exchange import Exchange
from meshloom.parameters.model import make_row_major
from meshloom.parameters.shards import Shards
from meshloom.parameters.unfilled_model import UnfilledModel
from meshloom.pipeline.runtime.held_parameters import HeldParameters
from meshloom.pipeline.runtime.microbatches import Around, Microbatches
from meshloom.pipeline.runtime.run import ActionListener, Sent
from meshloom.pipeline.schedules.schedule import Action, Schedule
from meshloom.pipeline.stages.program_store import ProgramStore, ReadyBatch
from meshloom.pipeline.stages.stages import Stage
from meshloom.program.capture.guarded_values import GuardedValue, check_step
from meshloom.program.capture.guards import Guards
from meshloom.program.cost.opaque_shares import check_divided
from meshloom.program.ir.batch_values import check_following
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.opaque.operator import is_opaque, trained_writes
from meshloom.program.operators.fused_grad_accumulation import DirectAccumulator
from meshloom.program.operators.used_rows import UsedRows
from meshloom.program.run.compiler import Compiler
from meshloom.program.store.program_cache import ProgramCache
from meshloom.replica.attachments import Attachments
from meshloom.replica.buffers.merged_buffers import RunningStatistics
from meshloom.replica.buffers.norm_statistics import decays
from meshloom.replica.chunk_scope import ChunkScope
from meshloom.replica.gradient_completion import GradientCompletion
from meshloom.replica.loss_stages import Finish, Stages, Statistics
from meshloom.replica.not_finite import locate_nan
from meshloom.telemetry.timings import Timings
from meshloom.tensor_parallel.division import Division


class ProgramStages(Stages):
    """One rank's stages of `job`'s loss under `plan`."""

    one_by_one, fixes_attributes = False, True

    def __init__(
        self, job: Job, plan: Plan, context: RankContext, *, dtype: torch.dtype | None = None, timings: Timings | None = None,
        stored: ProgramCache | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.context, self.job, self.dtype = plan, context, job, dtype
        self._timings = timings = timings or Timings()
        self._team = team = context.team or simulated_groups(1)[0]
        self.pp: Group = context.groups["pp"] if plan.pp > 1 else simulated_groups(1)[0]
        self.tp: Group | None = context.groups["tp"] if plan.tp > 1 else None
        if self.tp is not None:
            limits: Any = {"memory_bytes": plan.memory_bytes or None, "num_stages": plan.pp}
            given: Any = {"rules": job.rules, "placements": plan.tp_placements}
            self.division = Division(self.tp, timings=timings, stored=stored, **given, **limits)
        self.programs = ProgramStore(job, plan, team, self.division, dtype=dtype, timings=timings, stored=stored)  # fmt: skip
        self.cutter = self.programs.cutter
        self.microbatches: Microbatches
        self._compiled: list[str] = []  # modules that torch.compile would have compiled
        self.compiler = Compiler(context.device) if plan.compiles else None
        self._model: nn.Module
        self._scope: ChunkScope
        self._shards: Shards
        self._guards: dict[LossFunction, list[GuardedValue]] = {}
        self._held: HeldParameters
        self._rows = UsedRows({}, context.device)  # which rows of tables with sparse gradients a step uses

    def open(self, model: nn.Module, scope: ChunkScope, unfilled: UnfilledModel | None) -> None:
        self._scope, self._compiled = scope, without_compilation(model)
        world, size = self.context.world, self.plan.largest_share(self.job.batch_size)[0]
        with self._timings.of("first batches"):
            first = on_rank_0(world, lambda: self._first_batches(model, size), DataError)
        batches = first or []
        there = [to_device(each, self.context.device, self.dtype) for each in batches]
        with unfilled.standing_in() if unfilled and world.rank == 0 else nullcontext():
            found = _captured(self, model, there, batches)
        self.cut = tuple(each for each in found if self.cutter.ranks[each.number] == self.pp.rank)
        self._check_divided(model)
        self.writes_trained = any(trained_writes(each.program) for each in self.cut)
        self.late, self.runs_modules = self.programs.summed, bool(self.programs.opaque)

    @property
    def holders(self) -> Mapping[str, tuple[int, ...]]:
        return self.cutter.holders

    @property
    def pieces(self) -> Mapping[str, Pieces]:
        return self.programs.pieces

    def take(self, model: nn.Module, shards: Shards) -> Statistics:
        make_row_major(model)
        self._model, self._shards = model, shards
        self._guards = {self.job.loss: Guards(self.job.loss, model, self.programs.opaque).values}
        return {each.number: _statistics_of(each, model, self, shards) for each in self.cut}

    def connect(
        self, parameters: NamedParameters, exchange: Exchange, held: HeldParameters, completion: GradientCompletion
    ) -> ExitStack:  # fmt: skip
        self._held = held
        # With a single chunk autograd already writes gradients in place.
        accumulator = DirectAccumulator(exchange.buffer) if self.plan.num_chunks > 1 else None
        self.microbatches = Microbatches(
            self.programs, self._model, held.named, self.pp, self.tp, self.context.device, completion.ready, accumulator,
            each_microbatch=exchange.ownership.each_chunk, units=held.units, used_rows=self._rows, compiler=self.compiler,
        )  # fmt: skip
        undo = completion.watch(self.microbatches.arrived)
        undo.enter_context(self._rows.watch(self._model, self.programs.opaque))
        return undo

    def attach(self, at: Attachments) -> None:
        at.begin.append(lambda step: check_step(self._guards[self.job.loss]))
        if self._rows.flags.numel():
            at.begin.append(lambda step: self._rows.begin())

    def schedule(self, num_microbatches: int) -> Schedule:
        return self.cutter.schedule(num_microbatches)

    def prepare(self, chunks: Sequence[Chunk], most: int, finish: Finish, around: Around) -> Sequence[Action]:
        for parameter in self._held.named.values():
            parameter.grad = None
        return self.microbatches.prepare(self._ready(chunks), most, finish, around)

    def train(self, listeners: Sequence[ActionListener]) -> Sent:
        return self.microbatches.train(listeners)

    def evaluate(
        self, batch: Any, metric: LossFunction, moment: Moment, take: Callable[[Any], None]
    ) -> Sent:  # fmt: skip
        if metric in self._guards:
            check_step(self._guards[metric])
        ready = self.programs.ready(batch, loss=metric, training=False)
        if metric not in self._guards:
            self._guards[metric] = Guards(metric, self._model, self.programs.opaque).values
        with moment.entered():
            return self.microbatches.evaluate(ready, take)

    def locate(self, chunks: Sequence[Chunk]) -> list[Any] | None:
        return locate_nan(self._held, self._team, chunks, self._ready(chunks), self._scope, self.microbatches)

    def _ready(self, chunks: Sequence[Chunk]) -> list[ReadyBatch]:
        return [self.programs.ready(batch) for batch in [self._scope.data(chunk) for chunk in chunks]]

    def watch_rows(self, tables: Mapping[str, int], device: torch.device) -> None:
        self._rows = UsedRows(tables, device)

    def used_rows(self, name: str) -> Tensor | None:
        return self._rows.of(name, self._shards.pieces.get(name), self._shards.rank)

    @property
    def row_flags(self) -> Tensor | None:
        return self._rows.flags if self._rows.flags.numel() else None

    @property
    def readings(self) -> str | None:
        return self.programs.told()

    @property
    def notes(self) -> list[str]:
        leaves = self.programs.opaque_notes()
        if leaves and self.division and (share := self.division.share_divided) < 0.5:
            leaves.append(f"tp={self.plan.tp} divides {share:.0%} of the parameters.")
        return [*compiled_notes([] if self.compiler else self._compiled), *leaves]

    def _first_batches(self, model: nn.Module, size: int) -> list[Any]:
        """One to capture the loss with, and two to compare with. Raises `CaptureError` for what changes as these are read."""
        dataset = build_dataset(self.job.data, self.job.seed)
        with closing(reading_first(self.job, dataset, size)) as reading:
            batches = list(islice(reading, 1))
            leaves = named_leaves(self.job.leaves, model)
            guards = Guards(self.job.loss, model, leaves)
            batches += islice(reading, 2)
        guards.check_reading(dataset, self.job.collate)
        return batches

    def _check_divided(self, model: nn.Module) -> None:
        """Raise `CaptureError` where leaves leave nothing to divide over tp, and no two stages have parameters."""
        sizes = {name: each.numel() for name, each in model.named_parameters()}
        stages = {self.cutter.holders.get(name) for name in sizes} - {None}
        if not (self.division and self.division.share_divided) and len(stages) <= 1:
            check_divided(self.plan, list(self.programs.opaque), sizes)


def _captured(of: ProgramStages, model: nn.Module, there: list[Any], batches: list[Any]) -> tuple[Stage, ...]:
    """The stages of the loss. there: `batches` on the device, in the precision of the programs."""
    world, programs = of.context.world, of.programs
    if of.compiler:
        check_together(world, of.compiler.check)
    stages = programs.open(there, world, model, own=next(iter(batches), None))
    on_rank_0(world, partial(_check_values, programs.others, there), CaptureError)
    return stages


def _check_values(others: Mapping[str, str | None], batches: Sequence[Any]) -> None:
    """others: those of the program that was captured from the first of the batches."""
    check_following(others, leaves_of(batches[-1]).values)


def _statistics_of(stage: Stage, model: nn.Module, of: ProgramStages, shards: Shards) -> RunningStatistics:
    program, rules = stage.program, of.job.buffers
    for name in program.changing:
        if callable(rule_of(name, rules)) and name in shards.pieces:
            raise JobError(
                f'Job(buffers=...) gives {name} a function, and {of.plan} divides it. Declare "last", "sum" or ml.ema(decay), which go by elements.'
            )
    kept, named = decays(program.nodes), {each.value: name for name, each in program.buffers.items()}
    return RunningStatistics(
        model, of.context.groups["dp"], num_chunks=of.plan.microbatches, rules=rules, changing=stage.changing,
        decays={named[value]: each for value, each in kept.items() if value in named},
        opaque=[str(node.args[2]) for node in program.nodes if is_opaque(node)],
    )  # fmt: skip
