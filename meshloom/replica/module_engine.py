"""Runs the user's unchanged module, chunk after chunk: the engine of data-parallel plans, where every rank holds the full model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.checkpoint.resuming import check_together
from meshloom.checkpoint.tensor_file import Stream
from meshloom.comm.rank_context import RankContext
from meshloom.core.job import Job, LossFunction, NamedParameters
from meshloom.core.losses.logged import computed_with_logs
from meshloom.core.losses.loss_sum import as_sum
from meshloom.core.losses.turns import LossTurn, OwnGradients
from meshloom.core.mesh import Axis
from meshloom.core.moments.current_step import Moment
from meshloom.core.plan import Plan
from meshloom.data.chunks import Chunk
from meshloom.exchange.exchange import Emit, Exchange
from meshloom.exchange.units.compiled_units import CompiledUnits, unwatched
from meshloom.exchange.units.unit_access import UnitAccess
from meshloom.exchange.units.unit_gathering import STEP
from meshloom.exchange.zero_three import slices_of
from meshloom.parameters.model import trainable
from meshloom.parameters.shards import Shards
from meshloom.parameters.unfilled_model import UnfilledModel, take_share
from meshloom.pipeline.runtime.recorder import Recorder
from meshloom.program.run.compiler import Compiler
from meshloom.replica.buffers.batch_norm import synchronise_batch_norm
from meshloom.replica.buffers.merged_buffers import RunningStatistics
from meshloom.replica.chunk_scope import ChunkScope
from meshloom.replica.engine import Engine
from meshloom.replica.exchanges.gathered_rows import GatheredRows
from meshloom.replica.gathered_tensors import weights_of_units
from meshloom.replica.loss_sums import LossSums
from meshloom.replica.not_finite import find_not_finite
from meshloom.replica.step_checks import hooks_kept
from meshloom.replica.team_sums import TeamSums
from meshloom.telemetry.traffic import ExpectedBytes


class ModuleEngine(Engine):
    """One rank's `job` under `plan`, which has neither tp nor pp. updates: whether the rank updates its parameters."""

    def __init__(self, job: Job, plan: Plan, context: RankContext, *, updates: bool = True) -> None:
        self.shards = Shards({}, None)
        self._job, self._plan, self._context = job, plan, context
        self.team_sums = TeamSums(None, None)
        self._model: nn.Module
        self._parameters: NamedParameters = []
        self._exchange: Exchange
        self._units: UnitAccess | None = None  # zero=3
        self._compiled_units: CompiledUnits | None = None
        self.compiler = Compiler(context.device) if plan.compiles else None
        self._losses: dict[LossFunction, LossFunction] = {}  # as written -> compiled
        self._loss = job.loss  # whose turn it is
        self._begun = set[int]()  # losses that have had a turn, by identity
        self._gathered = GatheredRows(
            plan, context, num_losses=len(job.losses) or 1, updates=updates, meet=self._meet
        )

    def open(
        self, model: nn.Module, scope: ChunkScope, unfilled: UnfilledModel | None = None, own: OwnGradients | None = None
    ) -> None:  # fmt: skip
        if self.compiler:
            check_together(self._context.world, self.compiler.check)
        take_share(model, self.shards, unfilled, self._context.world)
        self._model, self._parameters = model, trainable(model)
        for by_stage in scope.statistics:
            by_stage[0] = RunningStatistics(
                model, self._context.groups["dp"], num_chunks=self._plan.microbatches, synchronised=self._plan.sync_batch_norm,
                rules=self._job.buffers, compiled=self._plan.compiles,
            )  # fmt: skip

    @property
    def parameters(self) -> NamedParameters:
        return self._parameters

    @property
    def replicated(self) -> Sequence[str]:
        return ()

    def connect(self, exchange: Exchange) -> ExitStack:
        self._exchange = exchange
        undo = ExitStack()
        if self._plan.sync_batch_norm and self._plan.dp > 1:
            undo.enter_context(
                synchronise_batch_norm(self._model, self._context.statistics, compiled=self._plan.compiles, meet=self._meet)
            )  # fmt: skip
        if (sliced := slices_of(exchange)) is not None:
            self._units = UnitAccess(sliced.gathering)
            undo.enter_context(self._units.connect())
            if self.compiler and (compiled := CompiledUnits(sliced.units, self.compiler)):
                self._compiled_units = compiled
                undo.enter_context(compiled.connect())
            elif self.compiler and all(unit.module is None for unit in sliced.units):
                self._compile_losses()
        elif self.compiler:
            self._compile_losses()
        for _, parameter in self._parameters:
            undo.callback(parameter.register_post_accumulate_grad_hook(exchange.ready_hook(parameter)).remove)
        return undo

    def turn_to(self, turn: LossTurn) -> None:
        self._loss = self._job.losses[turn.loss].loss

    def run(
        self,
        chunks: Sequence[Chunk],
        scope: ChunkScope,
        loss_sums: LossSums,
        recorder: Recorder | None = None,
    ) -> None:
        compiled = self._compiled_units.computing() if self._compiled_units else nullcontext()
        first = id(self._loss) not in self._begun
        self._begun.add(id(self._loss))
        watched = hooks_kept(self._parameters, self._plan) if first else nullcontext()
        with self.computing(STEP, idle=not chunks), compiled, watched:
            for chunk in chunks:
                self._context.activity.enter("chunk", chunk.step, chunk.index)
                data = scope.data(chunk)
                gathered = self._gathered.chunk(self._loss, chunk.step, chunk.batch)
                with scope.forward(chunk), gathered:
                    root, loss, weight = loss_sums.add(self._computed(data), chunk)
                    root = self._gathered.end_forward(root)
                    if chunk is chunks[-1] and not self._units:  # communication overlaps with its backward
                        self._complete(loss_sums)
                        self._exchange.begin_last_chunk()
                    with self._exchange.chunk():
                        torch.autograd.backward(root)
                del root
                scope.done(chunk, weight, loss.detach())
                del loss
                if self._units:
                    self._units.chunk_ended()
            if not chunks:
                self._gathered.idle(self._loss)
        if not loss_sums.started:
            self._complete(loss_sums)
        self._exchange.end_chunks()

    def computing(self, kind: str, *, idle: bool = False) -> AbstractContextManager[None]:
        return self._units.computing(kind, idle=idle) if self._units else nullcontext()

    def evaluate(
        self, batch: Any, metric: LossFunction, moment: Moment, take: Callable[[Any], None]
    ) -> None:  # fmt: skip
        with moment.entered(), self._gathered.evaluating():
            take(metric(self._model, batch))
        if self._units:
            self._units.chunk_ended()

    def add_up(self, axis: Axis, sums: Tensor) -> None:
        pass

    def refresh_borrowed(self) -> None:
        pass

    def gather(self, mine: Callable[[Emit], None], take: Emit) -> None:
        mine(take)

    def weights(self) -> Stream | dict[str, Any]:
        if (sliced := slices_of(self._exchange)) is not None:
            return weights_of_units(self._model, sliced)
        return self._model.state_dict()

    def locate_nan(self, chunks: Sequence[Chunk], scope: ChunkScope) -> list[Any] | None:
        def loss_of(chunk: Chunk) -> Tensor:
            with scope.draws(chunk):
                return self._rerun(chunk, scope.data(chunk))

        exchange = self._exchange
        sliced = exchange.each_slice() if exchange.only_slices else None
        values = (
            [(each.name, each.data()) for each in sliced]
            if sliced is not None
            else self._model.named_parameters()
        )
        with self.computing("rerun", idle=not chunks):
            return find_not_finite(self._model, values, chunks, loss_of)

    def check_replicated(self) -> str | None:
        return None

    def expected_bytes(self) -> ExpectedBytes:
        return self._gathered.expected_bytes()

    def _meet(self) -> None:
        """Before a collective of the replicas within forward or backward."""
        if self._units:
            self._units.meet()

    def _compile_losses(self) -> None:
        assert self.compiler
        of_job = [each.loss for each in self._job.losses.values()] or [self._job.loss]
        self._losses = {each: partial(unwatched, self.compiler.function(each)) for each in of_job}

    def _complete(self, loss_sums: LossSums) -> None:
        loss_sums.close()
        # Replicas with fewer chunks have started fewer collectives of gradients if each chunk's are sent.
        loss_sums.start(self._context.statistics if self._exchange.each_chunk else self._context.groups["dp"])

    def _computed(self, data: Any) -> Any:
        """What the loss returns for a chunk."""
        return computed_with_logs(self._losses.get(self._loss, self._loss), self._model, data)

    def _rerun(self, chunk: Chunk, data: Any) -> Tensor:
        with self._gathered.again():
            return as_sum(self._loss(self._model, data), chunk.samples, needs_gradient=False)[0]
