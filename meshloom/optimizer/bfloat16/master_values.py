"""The values that a job's parameters start with before they are rounded: each rank fills the copies of what it updates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from meshloom.checkpoint.resuming import check_together
from meshloom.comm.rank_context import RankContext
from meshloom.comm.steps import Steps
from meshloom.core.errors import JobError
from meshloom.core.job import Job, NamedParameters
from meshloom.core.plan import Plan
from meshloom.core.precisions import PRECISIONS
from meshloom.core.random import preserved_draws
from meshloom.exchange.exchange import Exchange
from meshloom.optimizer.bfloat16.lowered import master_dtype, own_model
from meshloom.optimizer.bfloat16.masters import Masters, WithMasters, num_parts
from meshloom.optimizer.user_optimizer import UserOptimizers, takes_closure
from meshloom.parameters.file_weights import agree_on_weights
from meshloom.parameters.model import state_of, trainable
from meshloom.parameters.shards import Shards
from meshloom.parameters.sparse_parameters import refuse_sparse_adam
from meshloom.parameters.starting_model import StartingModel
from meshloom.telemetry.traffic import Traffic

T = TypeVar("T")


def master_values(
    job: Job, plan: Plan, context: RankContext, start: StartingModel, dtype: torch.dtype | None
) -> Steps[MasterValues | None]:
    """The values of masters, equal on all ranks; None: the plan has none. start: the lowered model. dtype: in which all is
    computed instead."""
    if dtype is not None or not PRECISIONS[plan.precision].parameters:
        return None
    values = MasterValues(job, plan, context, is_resumed=start.is_resumed)
    yield from values.settle()
    return values


class MasterValues:
    """The job's model once more, in its own precision, without memory where its construction can be recorded.

    job: as lowered. whole: its trainable parameters, of full shape, which the job's optimizer function gets. is_resumed:
    whether a checkpoint gives the values before the first step.
    """

    def __init__(self, job: Job, plan: Plan, context: RankContext, *, is_resumed: bool) -> None:
        self._job = replace(job, model=own_model(job))
        self._context, self._is_resumed = context, is_resumed
        self._copied = Traffic()
        with preserved_draws():
            self._start = StartingModel(self._job, plan, context, None, may_share=True, resumed=is_resumed)
        self.whole: NamedParameters = trainable(self._start.model)

    def settle(self) -> Steps[None]:
        """All ranks start with equal values, those of the job's files if it has some."""
        start = self._start
        weights = yield from agree_on_weights(self._job, start.model, self._context.world)
        self._copied = yield from start.settle(weights)
        if weights and start.unfilled is None:
            weights.fill(start.model)

    def given(self, lowered: NamedParameters, function: Callable[[NamedParameters], T]) -> T:
        """What `function` returns for `whole`, as `StartingModel.given`; lowered: the parameters themselves."""
        assert [name for name, _ in lowered] == [name for name, _ in self.whole]
        return self._start.given(self.whole, function)

    def open(
        self, exchange: Exchange, named: NamedParameters, lowered: NamedParameters, shards: Shards, made: UserOptimizers,
        refused: Sequence[Collection[str]],
    ) -> Steps[WithMasters]:  # fmt: skip
        """`exchange` with masters of what this rank updates of `named`, and their values. Raises `JobError` on all ranks.

        lowered: all trainable parameters of the job's model. refused: of `_check`.
        """
        context = self._context
        masters = Masters(exchange, named, self.whole, shards, context.device)
        dtypes = {name: each.dtype for name, each in lowered}
        masters.parts = {
            name: num_parts(master_dtype(each.dtype))
            for name, each in self.whole
            if dtypes[name] == torch.bfloat16
        }

        def start() -> None:
            _check({name for name, _ in lowered}, refused, made)
            self._fill(masters, shards)
            if not self._is_resumed:
                masters.check_start()

        for name, each in self.whole if any(reach != "element" for reach in made.reaches) else ():
            if name in shards.pieces:  # one that keeps all of it has it in memory
                each.data = torch.empty(each.shape, dtype=master_dtype(each.dtype), device=context.device)
        yield from check_together(context.world, start)
        return WithMasters(exchange, masters, context.groups["dp"], context.readers, self._copied)

    def _fill(self, masters: Masters, shards: Shards) -> None:
        if self._is_resumed:
            return
        copies = [(each.name, each.start, each.stop, each.data()) for each, _ in masters.copies()]
        if unfilled := self._start.unfilled:
            unfilled.fill_copies(copies, shards)
            return
        state = state_of(self._start.model)
        for name, start, stop, memory in copies:
            memory.copy_(shards.take(name, state[name].detach()).reshape(-1)[start:stop])


def _check(trained: Collection[str], refused: Sequence[Collection[str]], made: UserOptimizers) -> None:
    """Raises `JobError` for what masters could not follow. refused: names of parameters with sparse gradients; with
    max_norm; written by forwards."""
    reasons = (
        ("has sparse gradients (sparse=True)", "Use sparse=False"),
        ("has max_norm, by which forwards scale its rows", "Leave max_norm out"),
        ("is written by forwards, too", "Leave it to the optimizer"),
    )
    for names, (what, instead) in zip(refused, reasons, strict=True):
        for name in names:
            if name in trained:
                raise JobError(
                    f"{name} {what}, and parameters in bfloat16 are updated as copies in float32, which do not see that. {instead}, or use precision=bf16-mixed."
                )
    refuse_sparse_adam(made.optimizers, "of parameters in bfloat16")
    for each in made.optimizers:
        if takes_closure(each):
            raise JobError(
                f"{type(each).__name__} evaluates the loss several times in a step, and parameters in bfloat16 are rounded to 8 binary digits before each. Use "
                "precision=bf16-mixed."
            )
