"""The user's module and loss as they are written, chunk after chunk: the only stage of plans with neither tp nor pp."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.checkpoint.resuming import check_together
from meshloom.comm.rank_context import RankContext
from meshloom.comm.simulated import simulated_groups
from meshloom.core.errors import JobError
from meshloom.core.job import Job, LossFunction, NamedParameters
from meshloom.core.losses.logged import joined
from meshloom.core.losses.loss_sum import as_sum
from meshloom.core.modules.compiled import compiled_names
from meshloom.core.modules.named_leaves import named_leaves
from meshloom.core.moments.bilinear import bilinear_unwatched
from meshloom.core.moments.current_step import Moment, answered_by
from meshloom.core.moments.leaf_draws import leaves_in
from meshloom.core.moments.uncompiled import uncompiled
from meshloom.core.plan import Plan
from meshloom.core.random import KeyedDraws
from meshloom.data.chunks import Chunk
from meshloom.exchange.exchange import Exchange
from meshloom.exchange.units.compiled_units import CompiledUnits, unwatched
from meshloom.exchange.units.unit_access import UnitAccess
from meshloom.parameters.shards import Shards
from meshloom.parameters.unfilled_model import UnfilledModel
from meshloom.pipeline.runtime.held_parameters import HeldParameters
from meshloom.pipeline.runtime.microbatches import Around
from meshloom.pipeline.runtime.run import ActionListener, PipelineRun, Sent
from meshloom.pipeline.runtime.stage import StageRun
from meshloom.pipeline.schedules.builders import make_schedule
from meshloom.pipeline.schedules.schedule import Action, Schedule
from meshloom.program.run.compiler import Compiler
from meshloom.replica.attachments import Attachments
from meshloom.replica.buffers.batch_norm import synchronise_batch_norm
from meshloom.replica.buffers.merged_buffers import RunningStatistics
from meshloom.replica.chunk_scope import ChunkScope
from meshloom.replica.exchanges.gathered_rows import GatheredRows
from meshloom.replica.gradient_completion import GradientCompletion
from meshloom.replica.loss_stages import Finish, Stages, Statistics
from meshloom.replica.not_finite import find_not_finite
from meshloom.replica.step_checks import hooks_kept
from meshloom.telemetry.traffic import ExpectedBytes


class ModuleStages(Stages):
    """Of one rank, which holds all of the model. updates: whether the rank updates its parameters."""

    def __init__(self, job: Job, plan: Plan, context: RankContext, *, updates: bool = True) -> None:
        self._job, self._plan, self._context = job, plan, context
        self.compiler = Compiler(context.device) if plan.compiles else None
        self.loss = job.loss  # compiled, where it is
        self._compiled_units: CompiledUnits | None = None
        self.model: nn.Module
        self.scope: ChunkScope
        self._parameters: NamedParameters = []
        self._held: HeldParameters
        self._stage: ModuleStage
        self._runs: dict[int, PipelineRun] = {}  # by number of chunks
        self._run: PipelineRun | None = None  # of the step
        self._leaves: list[str] = []
        self.keys_draws = False  # of modules, or of leaves alone
        self.rows = GatheredRows(plan, context, updates=updates, meet=self._meet)

    def open(self, model: nn.Module, scope: ChunkScope, unfilled: UnfilledModel | None) -> None:
        if self.compiler:
            check_together(self._context.world, self.compiler.check)
        if self._plan.zero == 3 and (compiled := compiled_names(model)):
            raise JobError(
                f"{compiled[0] or 'The model'} is compiled (torch.compile), and zero=3 gathers parameters between its operators. "
                "Use zero=2, or leave torch.compile out."
            )
        self.scope, self._leaves = scope, named_leaves(self._job.leaves, model)
        self.keys_draws = bool(self._leaves or self._plan.keyed_draws)

    def take(self, model: nn.Module, shards: Shards) -> Statistics:
        self.model, plan = model, self._plan
        statistics = RunningStatistics(
            model, self._context.groups["dp"], num_chunks=plan.microbatches, synchronised=plan.sync_batch_norm,
            rules=self._job.buffers, compiled=plan.compiles,
        )  # fmt: skip
        return {0: statistics}

    def connect(
        self, parameters: NamedParameters, exchange: Exchange, held: HeldParameters, completion: GradientCompletion
    ) -> ExitStack:  # fmt: skip
        self._parameters, self._held = parameters, held
        self._stage = ModuleStage(self, exchange, held.units)
        undo = ExitStack()
        if self._plan.sync_batch_norm and self._plan.dp > 1:
            undo.enter_context(synchronise_batch_norm(self.model, self._context.statistics, meet=self._meet))
        if held.units:
            undo.enter_context(held.units.connect())
        if self.compiler:
            undo.enter_context(self._compile(self.compiler, held))
        for _, parameter in parameters:
            if ready := exchange.hook(parameter):
                undo.callback(parameter.register_post_accumulate_grad_hook(ready).remove)
        return undo

    def attach(self, at: Attachments) -> None:
        if self._plan.num_chunks > 1:
            begun = count()

            def first_alone(step: int) -> AbstractContextManager[None]:
                return nullcontext() if next(begun) else hooks_kept(self._parameters, self._plan)

            at.around.append(first_alone)
        if compiled := self._compiled_units:
            at.around.append(lambda step: compiled.computing())

    def schedule(self, num_microbatches: int) -> Schedule:
        return make_schedule("1f1b", 1, num_microbatches)

    def prepare(self, chunks: Sequence[Chunk], most: int, finish: Finish, around: Around) -> Sequence[Action]:
        self._stage.begin(chunks, finish, around)
        self._run = self._run_of(len(chunks)) if chunks else None
        return self._run.actions if self._run else ()

    def train(self, listeners: Sequence[ActionListener]) -> Sent:
        if self._run:
            self._run.run(listeners)
        else:
            self.rows.idle()
        return {}

    def evaluate(
        self, batch: Any, metric: LossFunction, moment: Moment, take: Callable[[Any], None]
    ) -> Sent:  # fmt: skip
        with moment.entered(), self.rows.evaluating(), leaves_in(self.model, self._leaves):
            take(metric(self.model, batch))
        if self._held.units:
            self._held.units.chunk_ended()
        return {}

    def locate(self, chunks: Sequence[Chunk]) -> list[Any] | None:
        def loss_of(chunk: Chunk) -> Tensor:
            data = self.scope.data(chunk)
            drawing = self.drawing(chunk) if self.keys_draws else nullcontext()
            with self.scope.draws(chunk), drawing, self.rows.again():
                return as_sum(self._job.loss(self.model, data), chunk.samples, needs_gradient=False)[0]

        with self._held.computing("rerun", idle=not chunks):
            return find_not_finite(self.model, self._held.kept().items(), chunks, loss_of)

    def expected_bytes(self) -> ExpectedBytes:
        return self.rows.expected_bytes()

    def drawing(self, chunk: Chunk) -> AbstractContextManager[Any]:
        """The context of a chunk in which its module draws, where draws have keys; programs key theirs themselves."""
        around = ExitStack()
        around.enter_context(leaves_in(self.model, self._leaves))
        if self._plan.keyed_draws:
            if not self._plan.compiles:
                around.enter_context(uncompiled())
                around.enter_context(bilinear_unwatched())
            around.enter_context(KeyedDraws(self.scope.rows(chunk), compiled=self._plan.compiles))
        return around

    def _run_of(self, num_chunks: int) -> PipelineRun:
        if num_chunks not in self._runs:
            schedule, alone = self.schedule(num_chunks), simulated_groups(1)[0]
            self._runs[num_chunks] = PipelineRun(
                schedule, alone, {0: self._stage}, [()] * num_chunks, self._context.device
            )
        return self._runs[num_chunks]

    def _meet(self) -> None:
        """Before a collective of the replicas within forward or backward."""
        if self._held.units:
            self._held.units.meet()

    def _compile(self, compiler: Compiler, held: HeldParameters) -> AbstractContextManager[Any]:
        """Of units, each by itself; else of the loss."""
        units = held.slices.units if held.slices else ()
        if compiled := CompiledUnits(units, compiler):
            self._compiled_units = compiled
            return compiled.connect()
        if all(unit.module is None for unit in units):
            self.loss = partial(unwatched, compiler.function(self._job.loss))
        return nullcontext()


class ModuleStage(StageRun):
    """Whole chunks, one after another: the context of a forward is left when its backward has ended."""

    def __init__(self, stages: ModuleStages, exchange: Exchange, units: UnitAccess | None) -> None:
        self._of, self._exchange, self._units = stages, exchange, units
        self._chunks: Sequence[Chunk] = ()
        self._finish: Finish
        self._around: Around
        self._root: Tensor | None = None
        self._entered = ExitStack()

    def begin(self, chunks: Sequence[Chunk], finish: Finish, around: Around) -> None:
        """From now on microbatches are these chunks. finish, around: as of `Stages.train`."""
        self._chunks, self._finish, self._around = chunks, finish, around

    def forward(self, microbatch: int) -> Mapping[str, Tensor]:
        of, chunk = self._of, self._chunks[microbatch]
        data = of.scope.data(chunk)
        with ExitStack() as entered:
            entered.enter_context(self._around(0, microbatch))
            if of.keys_draws:
                entered.enter_context(of.drawing(chunk))
            logged: dict[str, Any] = {}
            entered.enter_context(answered_by(gather=of.rows.answer, log=logged))
            if of.rows.may_wait:
                of.rows.begin(chunk.step, chunk.batch)
            returned = of.loss(of.model, data)
            root = self._finish(microbatch, joined(returned, logged) if logged else returned)
            self._root = of.rows.end_forward(root) if of.rows.may_wait else root
            self._entered = entered.pop_all()
        return {}

    def backward(self, microbatch: int) -> Mapping[str, Tensor]:
        with self._entered:
            root, self._root = self._root, None
            torch.autograd.backward(root)  # pyright: ignore[reportArgumentType]
            self._exchange.end_chunk()
        if self._units:
            self._units.chunk_ended()
        return {}

    def clear(self) -> None:
        self._chunks, self._root = (), None
        self._entered.close()
