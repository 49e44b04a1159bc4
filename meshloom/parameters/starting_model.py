"""The model of one rank as it starts: built or recorded, and filled with the values that all ranks start with.

tp=1, pp=1   every rank builds the model, and receives rank 0's values
otherwise    every rank records how it is built; once it is known what a rank holds, it fills that by itself.
             Where the construction cannot be recorded, or ranks' differ, as above
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

import torch

from meshloom.comm.objects import collect
from meshloom.comm.rank_context import RankContext
from meshloom.comm.steps import Steps
from meshloom.core.job import Job, NamedParameters
from meshloom.core.plan import Plan
from meshloom.parameters.model import build_model, check_dense_buffers, copy_from_first, state_of
from meshloom.parameters.unfilled_model import UnfilledModel, build_unfilled
from meshloom.parameters.value_reads import ValueReads
from meshloom.telemetry.traffic import Traffic

T = TypeVar("T")


class StartingModel:
    """The job's `model` on this rank. notes: for the user, before the first step."""

    def __init__(self, job: Job, plan: Plan, context: RankContext, dtype: torch.dtype | None) -> None:
        self._job, self._context = job, context
        self._is_part = plan.tp > 1 or plan.pp > 1
        self._unfilled: UnfilledModel | None = None
        self.notes: list[str] = []
        if self._is_part and context.device.type == "cpu":
            self.model, self._unfilled, note = build_unfilled(job, dtype)
            self.notes += [note] if note else []
        else:
            self.model = build_model(job, context.device, dtype)

    @property
    def unfilled(self) -> UnfilledModel | None:
        """What fills the part that this rank holds; None: the model has all its values."""
        return self._unfilled if self._unfilled and not self._unfilled.is_filled else None

    def settle(self, in_files: Collection[str]) -> Steps[Traffic]:
        """Makes sure that all ranks start with equal values, by copying those of rank 0 where they may differ.
        Returns the bytes copied. in_files: names of what is read from files."""
        copied = Traffic()
        num_ranks = self._context.world.size
        if num_ranks > 1:
            check_dense_buffers(self.model, f"{num_ranks} ranks keep only dense buffers equal")
        if self._is_part and (yield from self._fills_alone()):
            return copied
        num_bytes = sum(
            each.numel() * each.element_size()
            for name, each in state_of(self.model).items()
            if name not in in_files
        )
        for axis in ("tp", "dp", "pp"):
            group = self._context.groups.get(axis)
            if group is not None and group.size > 1:
                yield from copy_from_first(self.model, group, in_files)
                copied += Traffic.along(axis, broadcast=num_bytes)
        return copied

    def given(self, parameters: NamedParameters, function: Callable[[NamedParameters], T]) -> T:
        """What `function` returns for the parameters that the model was built with. Those that this rank does
        not hold as they are get values only if it reads them; then it is called again."""
        unfilled = self._unfilled
        empty = unfilled.empty(parameters) if unfilled else []
        if unfilled is None or not empty:
            return function(parameters)
        with ValueReads(each for _, each in empty) as reads:
            returned = function(parameters)
        if reads.found:
            unfilled.fill_parameters(empty)
            returned = function(parameters)
        return returned

    def _fills_alone(self) -> Steps[bool]:
        """Whether all ranks have recorded the same construction, so that each can fill what it holds. The rank
        that captures the loss needs all values at once; where constructions differ, every rank does."""
        mine = self._unfilled.values.digest() if self._unfilled else None
        digests: list[str | None] = yield from collect(self._context.world, mine)
        is_equal = mine is not None and len(set(digests)) == 1
        if self._unfilled and (not is_equal or self._context.world.rank == 0):
            self._unfilled.fill()
        return is_equal
