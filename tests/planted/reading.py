"""Bugs of what data a step reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import meshloom.data.map_data
import meshloom.data.stream_data
from meshloom.core.job import Job
from meshloom.data.map_data import Batches, ChunkSource
from tests.planted.bugs import Patch, bug, wrap


class Telling:
    """A dataset that is told other epochs. epoch: of all; None: each when it is iterated, after the samples are."""

    def __init__(self, dataset: Any, epoch: int | None) -> None:
        self._dataset, self._epoch, self._told = dataset, epoch, 0

    def set_epoch(self, epoch: int) -> None:
        self._told = epoch
        if self._epoch is not None:
            self._dataset.set_epoch(self._epoch)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self._dataset)
        self._dataset.set_epoch(self._told)
        return samples


@bug("fifth/drop_last_not_kept", "dropping the last batch", "dp=2", phase="step 2")
def drop_last_not_kept(patch: Patch) -> None:
    """The short last batch of an epoch is trained although the job drops it."""

    def begun(right: Any, self: Batches, job: Job, num_samples: int) -> None:
        right(self, replace(job, drop_last=False), num_samples)

    wrap(patch, Batches, "__init__", begun)


@bug("fourth/epoch_is_step", "told the epoch", "dp=2", phase="step 1")
def epoch_is_step(patch: Patch) -> None:
    """The dataset is told the step in place of the epoch."""

    def read(right: Any, self: ChunkSource, request: Any) -> Any:
        dataset = self._dataset
        self._dataset = Telling(dataset, request.step)
        try:
            return right(self, request)
        finally:
            self._dataset = dataset

    wrap(patch, ChunkSource, "__getitem__", read)


@bug("ninth/draws_of_first_sample", "told the epoch", "dp=2")
def draws_of_first_sample(patch: Patch) -> None:
    """Generators are seeded once for a chunk, by its first sample, and not for each."""
    seed, fresh = meshloom.data.map_data.seed_draws, [True]

    def read(right: Any, self: ChunkSource, request: Any) -> Any:
        fresh[0] = True
        return right(self, request)

    def seed_once(value: int) -> None:
        if fresh[0]:
            seed(value)
        fresh[0] = False

    wrap(patch, ChunkSource, "__getitem__", read)
    patch.setattr(meshloom.data.map_data, "seed_draws", seed_once)


@bug("ninth/epoch_told_too_late", "stream", "dp=2", phase="step 3")
def epoch_told_too_late(patch: Patch) -> None:
    """A stream is iterated before it is told its epoch."""
    wrap(
        patch,
        meshloom.data.stream_data,
        "stream_batches",
        lambda right, dataset, job: right(Telling(dataset, None), job),
    )
