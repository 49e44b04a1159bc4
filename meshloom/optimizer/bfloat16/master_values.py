"""The values that a job's parameters start with before they are rounded: each rank has them of what it updates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import torch
from torch import nn

from meshloom.checkpoint.resuming import check_together
from meshloom.comm.rank_context import RankContext
from meshloom.core.errors import JobError
from meshloom.core.job import Job, NamedParameters
from meshloom.core.random import preserved_draws
from meshloom.exchange.exchange import Ownership
from meshloom.optimizer.masters import Masters, master_dtype, num_parts
from meshloom.optimizer.user_optimizer import UserOptimizers, takes_closure
from meshloom.parameters.file_weights import agree_on_weights, copy_from_first_rank
from meshloom.parameters.model import build_model, describe_model, state_of, trainable
from meshloom.parameters.shards import Shards
from meshloom.parameters.sparse_parameters import refuse_sparse_adam
from meshloom.parameters.starting_model import StartingModel
from meshloom.parameters.values.building import swap_memory, without_memory
from meshloom.telemetry.traffic import Traffic

T = TypeVar("T")


def master_values(context: RankContext, start: StartingModel, exact: Job) -> MasterValues:
    """The values of masters, equal on all ranks. start: the lowered model. exact: the job in its own precision."""
    values = MasterValues(exact, context, start)
    values.settle()
    return values


class MasterValues:
    """The values of the job's model in its own precision, which `start` gives to masters with those that are rounded.

    exact: the job in its own precision. whole: its trainable parameters, of full shape, without memory, which the job's
    optimizer function gets. Where `start` had to build the lowered model, this one is built, too.
    """

    def __init__(self, exact: Job, context: RankContext, start: StartingModel) -> None:
        self._job, self._context, self._start = exact, context, start
        self._copied = Traffic()
        self._model: nn.Module | None = None
        with preserved_draws():
            if start.unfilled:
                model = describe_model(exact, None)
                for each in model.parameters():
                    swap_memory(each, without_memory(each, context.device))
            else:
                model = self._model = build_model(exact, context.device, None)
        self.whole: NamedParameters = trainable(model)

    def settle(self) -> None:
        """What was built here has equal values on all ranks, those of the job's files if it has some."""
        if self._model is None:
            return
        has_some = self._job.weights is not None
        weights = agree_on_weights(self._job, self._model, self._context.world) if has_some else None
        self._copied = copy_from_first_rank(self._model, self._context, weights)
        if weights:
            weights.fill(self._model)

    def given(
        self,
        lowered: NamedParameters,
        function: Callable[[NamedParameters], T],
        without_values: Callable[[NamedParameters], T | None],
    ) -> T:
        """What `function` returns for `whole`, as `StartingModel.given`; lowered: the parameters themselves."""
        assert [name for name, _ in lowered] == [name for name, _ in self.whole]
        return self._start.given(self.whole, function, without_values)

    def open(
        self, ownership: Ownership, named: NamedParameters, lowered: NamedParameters, shards: Shards, made: UserOptimizers,
        refused: Sequence[Collection[str]],
    ) -> Masters:  # fmt: skip
        """Masters of what this rank updates of `named` by `ownership`, and their values. Raises `JobError` on all ranks.

        lowered: all trainable parameters of the job's model. refused: of `_check`.
        """
        context = self._context
        masters = Masters(
            ownership, named, self.whole, shards, context.device, group=context.groups["dp"], control=context.readers, copied=self._copied,
        )  # fmt: skip
        dtypes = {name: each.dtype for name, each in lowered}
        masters.parts = {
            name: num_parts(master_dtype(each.dtype))
            for name, each in self.whole
            if dtypes[name] == torch.bfloat16
        }

        def start() -> None:
            _check({name for name, _ in lowered}, refused, made)
            self._fill(masters, shards)

        for name, each in self.whole if any(reach != "element" for reach in made.reaches) else ():
            if name in shards.pieces:  # one that keeps all of it has it in memory
                each.data = torch.empty(each.shape, dtype=master_dtype(each.dtype), device=context.device)
        check_together(context.world, start)
        return masters

    def _fill(self, masters: Masters, shards: Shards) -> None:
        copies = [(each.name, each.start, each.stop, each.data()) for each, _ in masters.copies()]
        if unfilled := self._start.unfilled:
            unfilled.fill_copies(copies)
        elif self._model is not None:
            state = state_of(self._model)
            for name, start, stop, memory in copies:
                memory.copy_(shards.take(name, state[name].detach()).reshape(-1)[start:stop])


def _check(trained: Collection[str], refused: Sequence[Collection[str]], made: UserOptimizers) -> None:
    """Raises `JobError` for what masters could not follow. refused: names of parameters with sparse gradients; with
    max_norm."""
    reasons = (
        ("has sparse gradients (sparse=True)", "Use sparse=False"),
        ("has max_norm, by which forwards scale its rows", "Leave max_norm out"),
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
