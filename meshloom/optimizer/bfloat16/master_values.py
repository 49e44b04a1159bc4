"""The values that a job's parameters start with before they are rounded: each rank fills the copies of what it updates."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TypeVar

import torch

from meshloom.checkpoint.resuming import check_together
from meshloom.comm.rank_context import RankContext
from meshloom.comm.steps import Steps
from meshloom.core.job import Job, NamedParameters
from meshloom.core.plan import Plan
from meshloom.core.random import preserved_draws
from meshloom.core.errors import JobError
from meshloom.exchange.exchange import Exchange
from meshloom.optimizer.bfloat16.lowered import master_dtype, own_model
from meshloom.optimizer.bfloat16.masters import Masters, WithMasters, num_parts
from meshloom.optimizer.sparse_parameters import refuse_sparse_adam
from meshloom.optimizer.user_optimizer import UserOptimizers, takes_closure
from meshloom.parameters.file_weights import agree_on_weights
from meshloom.parameters.model import state_of, trainable
from meshloom.parameters.shards import Shards
from meshloom.parameters.starting_model import StartingModel
from meshloom.telemetry.traffic import Traffic

T = TypeVar("T")


class MasterValues:
    """The job's model once more, in its own precision, without memory where its construction can be recorded.

    job: as lowered. whole: its trainable parameters, of full shape, which the job's optimizer function gets. is_resumed:
    whether a checkpoint gives the values before the first step.
    """

    def __init__(self, job: Job, plan: Plan, context: RankContext, *, is_resumed: bool) -> None:
        self._job = replace(job, model=own_model(job))
        self._context, self._is_resumed = context, is_resumed
        with preserved_draws():
            self._start = StartingModel(self._job, plan, context, None, may_share=True, resumed=is_resumed)
        self.whole: NamedParameters = trainable(self._start.model)

    def settle(self) -> Steps[Traffic]:
        """All ranks start with equal values, those of the job's files if it has some; returns the bytes copied."""
        start = self._start
        weights = yield from agree_on_weights(self._job, start.model, self._context.world)
        copied = yield from start.settle(weights)
        if weights and start.unfilled is None:
            weights.fill(start.model)
        return copied

    def given(self, parameters: NamedParameters, function: Callable[[NamedParameters], T]) -> T:
        """As `StartingModel.given`."""
        return self._start.given(parameters, function)

    def open(
        self, exchange: Exchange, named: NamedParameters, shards: Shards, made: UserOptimizers, lowered: NamedParameters
    ) -> Steps[WithMasters]:  # fmt: skip
        """`exchange` with masters of what this rank updates of `named`, and their values. Raises `JobError` on all ranks.
        lowered: all trainable parameters of the job's model."""
        context = self._context
        masters = Masters(exchange, named, self.whole, shards, context.device)
        dtypes = {name: each.dtype for name, each in lowered}
        masters.parts = {
            name: num_parts(master_dtype(each.dtype))
            for name, each in self.whole
            if dtypes[name] == torch.bfloat16
        }

        def start() -> None:
            refuse(made)
            self._fill(masters, shards)
            if not self._is_resumed:
                masters.check_start()

        for name, each in self.whole if any(reach != "element" for reach in made.reaches) else ():
            if name in shards.pieces:  # one that keeps all of it has it in memory
                each.data = torch.empty(each.shape, dtype=master_dtype(each.dtype), device=context.device)
        yield from check_together(context.world, start)
        return WithMasters(exchange, masters, context.groups["dp"], context.readers)

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


def refuse(made: UserOptimizers) -> None:
    """Raises `JobError` for optimizers that cannot update masters."""
    refuse_sparse_adam(made.optimizers, "where masters in float32 are updated (precision=bf16)")
    for each in made.optimizers:
        if takes_closure(each):
            raise JobError(
                f"{type(each).__name__} evaluates the loss several times in a step, at parameters that precision=bf16 rounds to 8 bits, in which its line search finds "
                "nothing. Use precision=bf16-mixed."
            )


def refuse_written(tables: Collection[str], limits: Collection[str], written: Collection[str]) -> None:
    """Raises `JobError` for trained parameters of which masters could not follow. tables: with sparse gradients.
    limits: with max_norm. written: by forwards."""
    for names, what, instead in (
        (tables, "has sparse gradients (sparse=True)", "Use sparse=False"),
        (limits, "has max_norm, which scales its rows in forwards", "Leave max_norm out"),
        (written, "is trained, and written by forwards", "Leave it to the optimizer"),
    ):
        for name in names:
            raise JobError(
                f"{name} {what}, and precision=bf16 keeps what is updated as a copy in float32, which does not see that. {instead}, or use precision=bf16-mixed."
            )
