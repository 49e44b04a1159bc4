"""What surrounds the forward of a chunk: its seed, its draws, the buffers that it writes, and who looks
on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from meshloom.comm.seat import Seat
from meshloom.comm.steps import Steps
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.random import KeyedDraws, Rows, chunk_seed, seed_everything
from meshloom.data.data import Chunk, to_device
from meshloom.replica.buffers.merged_buffers import RunningStatistics


class Observer(Protocol):
    """Who looks on while a step runs (verification does)."""

    def watch(self, chunk: Chunk, model: nn.Module) -> AbstractContextManager[list[str] | None]:
        """Entered around a chunk's forward and backward; yields a list to receive the digests of its random
        draws."""
        ...

    def chunk_done(self, chunk: Chunk, weight: float, loss_sum: float) -> None:
        """A chunk went forward and backward."""
        ...


class ChunkScope:
    """The chunks of one rank of a replica.

    dtype: that data is lifted to; None: it stays as it is. statistics: stage -> the buffers that its forward
        writes; the engine fills it.
    """

    def __init__(
        self, job: Job, plan: Plan, seat: Seat, model: nn.Module, *, dtype: torch.dtype | None = None
    ) -> None:
        self._job, self._plan, self._seat, self._model, self._dtype = job, plan, seat, model, dtype
        self.statistics: dict[int, RunningStatistics] = {}
        self.observer: Observer | None = None

    def data(self, chunk: Chunk) -> Any:
        """Its batch, where it is computed."""
        return to_device(chunk.data, self._seat.device, self._dtype)

    @contextmanager
    def forward(
        self, chunk: Chunk, again: Callable[[], Any], *, stage: int = 0, observed: bool = True
    ) -> Iterator[None]:
        """Around a chunk's forward on a stage; this rank's chunks in order. again: that forward once more,
        which returns what leaves it."""
        with ExitStack() as around:
            around.enter_context(self.statistics[stage].chunk(partial(self._once_more, chunk, again)))
            self._seed(chunk, around, self.observer if observed else None)
            yield

    @contextmanager
    def draws(self, chunk: Chunk) -> Iterator[None]:
        """The chunk's draws and nothing else, for a forward of which nothing is kept."""
        with ExitStack() as around:
            self._seed(chunk, around, None)
            yield

    def done(self, chunk: Chunk, weight: torch.Tensor | float, loss_sum: torch.Tensor) -> None:
        """The chunk went through; its loss is known."""
        if self.observer:
            self.observer.chunk_done(chunk, float(weight), float(loss_sum.detach()))

    def finish(self) -> Steps[None]:
        """After the step's last chunk: buffers have the same values on all replicas."""
        for statistics in self.statistics.values():
            yield from statistics.finish()

    def take_notes(self) -> list[str]:
        """What the user should be told of buffers, each once; empties the list."""
        return [note for statistics in self.statistics.values() for note in statistics.take_notes()]

    def _once_more(self, chunk: Chunk, again: Callable[[], Any]) -> Any:
        with self.draws(chunk):
            return again()

    def _seed(self, chunk: Chunk, around: ExitStack, observer: Observer | None) -> None:
        # With synchronised statistics microbatch j of all replicas is one chunk, of which this replica
        # computes some rows. Keyed draws are the same rows of that chunk's draws; without keys every replica
        # draws for itself, or all would draw the same.
        plan, index, rows = self._plan, chunk.index, None
        if plan.sync_batch_norm and plan.keyed_draws:
            m = plan.microbatches
            index = chunk.index % m
            sizes = plan.sizes(chunk.batch)[index::m]
            rows = Rows(sum(sizes[: self._seat.place.dp]), chunk.samples, sum(sizes))
        seed_everything(chunk_seed(self._job.seed, chunk.step, index))
        seen = around.enter_context(observer.watch(chunk, self._model)) if observer else None
        if plan.keyed_draws and not plan.captures:  # programs key their draws themselves
            around.enter_context(KeyedDraws(rows, seen))
