"""The model of one rank as it starts: built or described, and filled with the values that all ranks start with.

a rank holds all of it    every rank builds the model, and receives rank 0's values
it holds a part (tp, pp,  every rank builds it without the values of its parameters. Once it is known what a rank holds,
zero=3, one copy for the  that gets its values: from files or conventions, or the ranks of a host build it one after
replicas of a host,       another and each takes what it holds. Where it cannot be built without values, as above
masters)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from meshloom.checkpoint.resuming import check_together
from meshloom.comm.objects import collect, share_bytes
from meshloom.comm.rank_context import RankContext
from meshloom.core.errors import JobError
from meshloom.core.job import Job, NamedParameters
from meshloom.core.modules.built import originals
from meshloom.core.plan import Plan
from meshloom.core.random import model_seed, preserved_draws, seed_torch
from meshloom.core.units import format_bytes
from meshloom.machine.host_memory import total_bytes
from meshloom.parameters.file_weights import FileWeights, FromFiles, copy_from_first_rank
from meshloom.parameters.model import build_model, state_of
from meshloom.parameters.unfilled_model import UnfilledModel, build_unfilled
from meshloom.parameters.values.building import BuildingOrder
from meshloom.parameters.values.initial_values import FromCheckpoint, InitialValues
from meshloom.parameters.values.keyed_init import keyed_values
from meshloom.parameters.whole_model import WholeModel, check_alike
from meshloom.telemetry.traffic import Traffic

T = TypeVar("T")
MANY_BYTES = 4 << 30  # less is built in seconds


class StartingModel:
    """The job's `model` on this rank.

    exact: the job whose model has the values before they are rounded, from which the job's and their masters come; None: there
    are no masters. may_share: whether replicas may have one copy of the parameters. resumed: whether a checkpoint gives its
    state before the first step, so that it need not be drawn. host: equal on the ranks of one host. notes: for
    the user, before the first step.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        context: RankContext,
        dtype: torch.dtype | None,
        *,
        exact: Job | None,
        may_share: bool,
        resumed: bool,
        host: str,
    ) -> None:
        self._job, self.exact, self._context, self._host = job, exact, context, host
        self._is_resumed = resumed
        self._is_part = plan.tp > 1 or plan.pp > 1 or plan.zero == 3 or may_share or exact is not None
        self._unfilled: UnfilledModel | None = None
        self._initial: InitialValues
        self._whole: WholeModel | None = None  # which ranks build in turn
        self._order: BuildingOrder
        self._left: torch.Tensor | None = None  # torch's generator, once the optimizers are made
        self.notes: list[str] = []
        if self._is_part:
            seed_torch(model_seed(job.seed))
            seeded = torch.get_rng_state()
            self.model, self._unfilled, note = build_unfilled(job, context.device, dtype)
            self._draws = not torch.equal(torch.get_rng_state(), seeded)
            self.notes += [note] if note else []
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
    def unfilled(self) -> UnfilledModel | None:
        """What fills the part that this rank holds; None: the model has all its values."""
        return self._unfilled

    def settle(self, weights: FileWeights | None, *, fixed: bool) -> Traffic:
        """Makes sure that all ranks start with equal values, by copying those of rank 0 where each has built the model.
        Returns the bytes copied. weights: values in files, which take precedence. fixed: as of `WholeModel`."""
        self._order = BuildingOrder.of(self._context.world, self._host)
        if self._is_part and self._are_described():
            check_together(self._context.world, lambda: self._find_values(weights, fixed=fixed))
            return Traffic()
        return copy_from_first_rank(self.model, self._context, weights)

    def given(
        self,
        parameters: NamedParameters,
        function: Callable[[NamedParameters], T],
        without_values: Callable[[NamedParameters], T | None],
    ) -> T:
        """What `function` returns for the parameters that the model was built with. Where this rank does not hold them as they
        are, `without_values` is called; `function`, with their values, if that returns None, or if it draws and the values
        are drawn, after which it draws on one device."""
        seeded = self._seed_left()
        unfilled = self._unfilled
        if unfilled is None:
            return function(parameters)
        before = torch.get_rng_state()
        made = [without_values(parameters)]
        after = torch.get_rng_state()
        draws = not seeded and not torch.equal(before, after)
        self._left = after if seeded else None
        anew: list[bool] = collect(self._context.world, made[0] is None or draws)

        def call() -> None:
            made[0] = unfilled.with_values(self._initial, parameters, self._seeded(function))
            self._left = torch.get_rng_state()

        if any(anew):
            self._order.each(call)
        assert made[0] is not None
        return made[0]

    def finish(self) -> None:
        """After all that this rank holds has memory: gives it its values, and leaves torch's default generator alike on all
        ranks. Raises `JobError` if ranks have built different models."""
        unfilled, world = self._unfilled, self._context.world
        if unfilled is None:
            return
        if unfilled.values.is_built:
            self._order.each(unfilled.give_values)
            assert self._whole is not None
            check_alike(collect(world, self._whole.digests))
        else:
            check_together(world, unfilled.give_values)
        if self._left is None:
            self._seed_left()
        left = torch.get_rng_state() if self._left is None else self._left
        state = share_bytes(world, left.numpy().tobytes())
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def _seeded(self, function: Callable[[NamedParameters], T]) -> Callable[[NamedParameters], T]:
        """`function`, called with torch's default generator where it is on one device."""

        def called(parameters: NamedParameters) -> T:
            self._seed_left()
            return function(parameters)

        return called

    def _seed_left(self) -> bool:
        """Moves torch's default generator to where it was before the construction, on one device too, where values come from
        files, a checkpoint or conventions. Returns whether they do."""
        is_given = self._job.weights is not None or self._job.init == "keyed" or self._is_resumed
        if is_given:
            seed_torch(model_seed(self._job.seed))
        return is_given

    def _are_described(self) -> bool:
        """Whether all ranks have built the model without values; if one could not, each builds all of it."""
        everyone: list[bool] = collect(self._context.world, self._unfilled is not None)
        if self._unfilled and not all(everyone):
            self._find_values(None, fixed=False)
            self._unfilled.fill_parameters()
            self._unfilled.give_values()
            self._unfilled = None
        return all(everyone)

    def _find_values(self, weights: FileWeights | None, *, fixed: bool) -> None:
        unfilled = self._unfilled
        assert unfilled is not None
        state = state_of(self.model)
        parameters = dict(self.model.named_parameters())
        names = set(self.model.state_dict(keep_vars=True)) if self._is_resumed else set[str]()
        given = names | (weights.sources.keys() if weights else set[str]())
        if self._job.init == "keyed":
            with preserved_draws():
                values: InitialValues = keyed_values(self.exact or self._job, unfilled.had, unfilled.lacking)
        else:
            unfilled.had.clear()
            job, host = self.exact or self._job, torch.device("cpu")
            values = self._whole = WholeModel(
                lambda: build_model(job, host, None),
                self.model,
                parameters.keys() | unfilled.lacking,
                given,
                draws=self._draws,
                fixed=fixed,
            )
        self._initial = FromFiles(weights, values) if weights else values
        unfilled.values = FromCheckpoint(names, self._initial) if names else self._initial
        num_bytes = sum(each.nbytes for each in state.values())
        if values.is_built and num_bytes > total_bytes():
            raise JobError(
                f"Each rank builds the model ({format_bytes(num_bytes)}), in turn, before it keeps its part, and the memory of a host is {format_bytes(total_bytes())}. "
                'Use Job(init="keyed") or Job(weights=...), with which each makes what it holds alone.'
            )
        if values.is_built and num_bytes > MANY_BYTES and self._order.count > 1:
            self.notes.append(
                f"The {self._order.count} ranks of a host build the model ({format_bytes(num_bytes)}) one after another, so that its memory holds one whole model at a "
                'time. With Job(init="keyed") or Job(weights=...) each makes what it holds alone; with the former values are others, on one device, too.'
            )
