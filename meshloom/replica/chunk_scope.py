"""The context of a chunk's forward: its seed, its random draws, the buffers that it writes, and observers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from meshloom.comm.rank_context import RankContext
from meshloom.core.job import Job
from meshloom.core.modules.own_generators import own_generators, seed_own_generators
from meshloom.core.moments.current_step import Moment
from meshloom.core.plan import Plan
from meshloom.core.random import Rows, chunk_seed, evaluation_seed, seed_torch
from meshloom.data.chunks import Chunk
from meshloom.data.to_device import to_device
from meshloom.program.ir.sparse_constants import sparse_attributes
from meshloom.replica.buffers.merged_buffers import RunningStatistics
from meshloom.replica.model_state import ModelState, shown_names
from meshloom.telemetry.traffic import ExpectedBytes

_UNCHANGED = "Metrics write {}, which is put back after each of them: training goes on as without an evaluation (docs/contract.md)."


# A module that is there once something has been compiled: what `torch.compile` makes draws what the code as written draws.
_INDUCTOR = "torch._inductor.config"


class Observer(Protocol):
    """Observes the steps of a replica on this rank, for verification: it adds to them, and takes the place of nothing."""

    def watch(self, chunk: Chunk) -> AbstractContextManager[None]:
        """Context around a chunk's forward on its last stage and, where that is the only one, its backward."""
        ...

    def computed(self, gradients: Any) -> None:
        """After the first half of a step, with its `Gradients`. All ranks wait here together."""
        ...

    def updated(self, result: Any) -> None:
        """After the second half, with its `StepResult`. All ranks wait here together."""
        ...


class ChunkScope:
    """The chunks of one rank of a replica.

    dtype: the precision that data is converted to; None: no conversion.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        context: RankContext,
        model: nn.Module,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._job, self._plan, self._context, self._model, self._dtype = job, plan, context, model, dtype
        # With synchronised batch statistics, microbatch j of all replicas is one chunk, of which this replica
        # computes some rows. Keyed draws give it the same rows of that chunk's draws; without keys every
        # replica needs a seed of its own, or all would draw the same numbers.
        self._shares_chunks = plan.sync_batch_norm and plan.keyed_draws
        self.statistics: Mapping[
            int, RunningStatistics
        ] = {}  # stage -> the buffers that its forward writes, set by the engine
        self._finished = 0  # evaluations of the loss
        self.observer: Observer | None = None
        self._constants, self._generators = list(sparse_attributes(model)), own_generators(model)
        self._evaluation_writes = set[str]()  # names of what evaluations write
        self._told = set[str]()  # those that are in notes
        self.notes: list[str] = []  # others for the user

    def data(self, chunk: Chunk) -> Any:
        """The chunk's batch on the computing device."""
        return to_device(chunk.data, self._context.device, self._dtype)

    @contextmanager
    def forward(self, chunk: Chunk, *, stage: int = 0, observed: bool = True) -> Iterator[None]:
        """Context of a chunk's forward on a stage, this rank's chunks in order."""
        with ExitStack() as around:
            if (statistics := self.statistics[stage]).merges:
                around.enter_context(statistics.chunk())
            self._seed(chunk, around, self.observer if observed else None)
            yield

    @contextmanager
    def draws(self, chunk: Chunk) -> Iterator[None]:
        """The chunk's seed and random draws only, for a forward whose effects are discarded."""
        with ExitStack() as around:
            self._seed(chunk, around, None)
            yield

    def moment(self, chunk: Chunk) -> Moment:
        """Of a chunk's forward."""
        number = chunk.index % self._plan.microbatches if self._shares_chunks else chunk.index
        return Moment(chunk_seed(self._job.seed, chunk.step, number), chunk.step)

    def evaluation(self, chunk: Chunk, updates: int) -> Moment:
        """Of a chunk's metrics after `updates` updates."""
        return Moment(evaluation_seed(self._job.seed, chunk.step, chunk.index), updates)

    def seed(self, moment: Moment) -> None:
        """Torch's generator and those of modules."""
        seed_torch(moment.seed)
        if self._generators:
            seed_own_generators(self._generators, moment.seed)

    @contextmanager
    def evaluating(self) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        """Around an evaluation, at whose end the model is as before it; yields the context of each metric of a chunk, which finds it so."""
        state = ModelState(self._model, self._evaluation_writes)

        @contextmanager
        def metric() -> Iterator[None]:
            try:
                yield
            finally:
                state.put_back()

        try:
            yield metric
        finally:
            state.end()

    @property
    def ends_chunks(self) -> bool:
        """Whether `finish` has something to do."""
        return bool(self._constants) or any(each.merges for each in self.statistics.values())

    def finish(self, step: int) -> None:
        """After the step's last chunk: merge buffers over chunks and replicas. Raises `TrainingError` if a forward has
        changed a constant."""
        for constant in self._constants:
            constant.check()
        for statistics in self.statistics.values():
            statistics.finish()
        self._finished += 1

    def take_notes(self) -> list[str]:
        """Notes for the user about what forwards write, each once; clears them."""
        everything = [each for each in self.statistics.values() if each.merges]
        notes = [*self.notes, *(note for statistics in everything for note in statistics.take_notes())]
        self.notes = []
        new = sorted(self._evaluation_writes - self._told)
        self._told.update(new)
        return [*notes, _UNCHANGED.format(shown_names(new))] if new else notes

    def expected_bytes(self, *, each_time: bool) -> ExpectedBytes:
        """Of merging buffers. each_time: counted by evaluations of the loss, not by steps."""
        own = sum((each.expected_bytes() for each in self.statistics.values()), ExpectedBytes())
        return ExpectedBytes(so_far=own.so_far + own.per_step * self._finished) if each_time else own

    def rows(self, chunk: Chunk) -> Rows | None:
        """Which rows of the chunk that replicas share this one is; None: they share none."""
        if not self._shares_chunks:
            return None
        sizes = self._plan.sizes(chunk.batch)[
            chunk.index % self._plan.microbatches :: self._plan.microbatches
        ]
        return Rows(sum(sizes[: self._context.place.dp]), chunk.samples, sum(sizes))

    def _seed(self, chunk: Chunk, around: ExitStack, observer: Observer | None) -> None:
        moment = self.moment(chunk)
        self.seed(moment)
        config: Any = sys.modules.get(_INDUCTOR)
        if config:
            config.fallback_random = True
        around.enter_context(moment.entered())
        if observer:
            around.enter_context(observer.watch(chunk))
