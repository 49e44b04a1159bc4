"""The model of one rank as it starts: built or recorded, and filled with the values that all ranks start with.

a rank holds all of it    every rank builds the model, and receives rank 0's values
it holds a part (tp, pp,  every rank records how it is built; once it is known what a rank holds, it fills that by
zero=3, one copy for the  itself. Where the construction cannot be recorded, or ranks' differ, as above
replicas of a host)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

from meshloom.comm.objects import collect
from meshloom.comm.rank_context import RankContext
from meshloom.comm.steps import Steps
from meshloom.core.job import Job, NamedParameters
from meshloom.core.modules.built import originals
from meshloom.core.plan import Plan
from meshloom.core.random import model_seed, seed_torch
from meshloom.parameters.file_weights import FileWeights, FromFiles
from meshloom.parameters.initial_values import FromCheckpoint
from meshloom.parameters.model import build_model, copy_from_first, state_of
from meshloom.parameters.unfilled_model import UnfilledModel, build_unfilled
from meshloom.parameters.value_reads import ValueReadError, ValueReads
from meshloom.telemetry.traffic import Traffic

T = TypeVar("T")


class StartingModel:
    """The job's `model` on this rank.

    may_share: whether replicas may have one copy of the parameters. resumed: whether a checkpoint gives its state
    before the first step (`is_resumed`), so that it need not be drawn. notes: for the user, before the first step.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        context: RankContext,
        dtype: torch.dtype | None,
        *,
        may_share: bool,
        resumed: bool = False,
    ) -> None:
        self._job, self._context, self.is_resumed = job, context, resumed
        self._is_part = plan.tp > 1 or plan.pp > 1 or plan.zero == 3 or may_share
        self._unfilled: UnfilledModel | None = None
        self._generator_is_left = False
        self.notes: list[str] = []
        if self._is_part:
            self.model, self._unfilled, note = build_unfilled(job, context.device, dtype)
            self.notes += [note] if note and not (resumed and self._unfilled) else []
        else:
            self.model = build_model(job, context.device, dtype)
        if outside := next(
            (name for name, _ in self.model.named_parameters() if name in originals(self.model)), None
        ):
            self.notes.append(
                f"Job(model=...) returns parameters from outside of it ({outside} is one): ranks train copies, and what lies outside stays as it is. The trained "
                "values are in the checkpoint, and in the model that ranks have."
            )

    @property
    def _needs_no_draws(self) -> bool:
        return self._job.weights is not None or self._job.init == "keyed" or self.is_resumed

    @property
    def unfilled(self) -> UnfilledModel | None:
        """What fills the part that this rank holds; None: the model has all its values."""
        return self._unfilled

    def settle(self, weights: FileWeights | None) -> Steps[Traffic]:
        """Makes sure that all ranks start with equal values, by copying those of rank 0 where they may differ.
        Returns the bytes copied. weights: values in files, which take precedence."""
        copied = Traffic()
        if self._is_part and (yield from self._fills_alone()):
            if weights and self._unfilled:
                self._unfilled.values = FromFiles(weights, self._unfilled.values)
            if self.is_resumed and self._unfilled:
                names = frozenset(self.model.state_dict(keep_vars=True))
                self._unfilled.values = FromCheckpoint(names, self._unfilled.values)
            return copied
        num_bytes = sum(
            each.numel() * each.element_size()
            for name, each in state_of(self.model).items()
            if weights is None or name not in weights.sources
        )
        for axis in ("tp", "dp", "pp"):
            group = self._context.groups.get(axis)
            if group is not None and group.size > 1:
                yield from copy_from_first(self.model, group, weights.sources if weights else ())
                copied += Traffic.along(axis, broadcast=num_bytes)
        return copied

    def given(self, parameters: NamedParameters, function: Callable[[NamedParameters], T]) -> T:
        """What `function` returns for the parameters that the model was built with. Those that this rank does
        not hold as they are get values only if it reads them, and torch's generator moves to where the
        construction leaves it only if it draws; then it is called again."""
        unfilled = self._unfilled
        if self._needs_no_draws:
            self._leave_generator()
        if unfilled is None:
            return function(parameters)
        empty = unfilled.empty(parameters)
        before = torch.get_rng_state()
        returned: T | None = None
        with (
            ValueReads((each for _, each in empty), refused=not unfilled.is_lazy) as reads,
            suppress(ValueReadError),
        ):
            returned = function(parameters)
        draws = not self._generator_is_left and not torch.equal(torch.get_rng_state(), before)
        if draws:
            self._leave_generator()
        if reads.found:
            unfilled.values = unfilled.values.initial
            unfilled.fill_whole(empty)
        if returned is None or draws or reads.found:
            returned = function(parameters)
        held = {id(each) for each in self.model.parameters()}
        unfilled.release([(name, each) for name, each in empty if id(each) in held])
        return returned

    def finish(self) -> None:
        """After all that this rank holds has been filled."""
        if not self._generator_is_left:
            self._leave_generator()

    def _leave_generator(self) -> None:
        """Moves torch's default generator to where it is on one device: as the construction leaves it; as before it
        where values come from files, a checkpoint or keyed draws, so that not all draws need to be made."""
        self._generator_is_left = True
        if self._needs_no_draws:
            seed_torch(model_seed(self._job.seed))
        elif self._unfilled:
            self._unfilled.finish()

    def _fills_alone(self) -> Steps[bool]:
        """Whether all ranks have recorded the same construction, so that each can fill what it holds; where
        constructions differ, every rank fills everything."""
        mine = self._unfilled.values.digest() if self._unfilled else None
        digests: list[str | None] = yield from collect(self._context.world, mine)
        is_equal = mine is not None and len(set(digests)) == 1
        if self._unfilled and not is_equal:
            self._unfilled.fill()
            self._unfilled.finish()
            self._unfilled = None
        return is_equal
