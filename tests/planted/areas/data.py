"""Bugs of data: orders, splits, draws while reading, streams."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import meshloom.data.map_data
import meshloom.data.stream_data
import meshloom.replica.chunk_scope
from meshloom.data.map_data import Batches, ChunkSource
from tests.planted.bugs import Patch, bug, wrap


def _batches(patch: Patch, change: Any) -> None:
    """Changes the indices of a step's batch."""

    def changed(right: Any, self: Batches, step: int) -> Any:
        epoch, indices = right(self, step)
        return epoch, change(list(indices), step, self)

    wrap(patch, Batches, "of", changed)


@bug(causes="data", module="first")
def a_batch_is_read_backwards(patch: Patch) -> None:
    _batches(patch, lambda indices, step, self: indices[::-1])


@bug(causes="data", module="first")
def the_first_sample_is_read_twice(patch: Patch) -> None:
    _batches(patch, lambda indices, step, self: [indices[0], *indices[:-1]])


@bug(causes="data", module="first")
def samples_are_not_shuffled(patch: Patch) -> None:
    _batches(patch, lambda indices, step, self: list(range(step * 13, step * 13 + len(indices))))


@bug(causes="data", says="end of the epoch", module="first")
def the_short_batch_is_filled_up(patch: Patch) -> None:
    """With samples of its own, so that it keeps its size."""
    _batches(patch, lambda indices, step, self: indices if len(indices) == 13 else indices[:1] * len(indices))


@bug(causes="data", says="end of the epoch", module="first")
def the_second_epoch_begins_one_sample_late(patch: Patch) -> None:
    def late(indices: list[int], step: int, self: Batches) -> list[int]:
        return [*indices[1:], indices[0]] if step >= self.per_epoch else indices

    _batches(patch, late)


@bug(causes="data", module="first")
def the_second_step_reads_the_first_batch(patch: Patch) -> None:
    wrap(patch, Batches, "of", lambda right, self, step: right(self, 0 if step == 1 else step))


@bug(causes="data", module="first")
def microbatches_are_in_the_wrong_order(patch: Patch) -> None:
    def turned(right: Any, replica: int, ranges: Any, plan: Any) -> Any:
        mine = right(replica, ranges, plan)
        return [replace(other, index=own.index) for own, other in zip(mine, reversed(mine), strict=True)]

    wrap(patch, meshloom.data.map_data, "share_of", turned)


@bug(causes="data", module="first")
def replicas_are_exchanged(patch: Patch) -> None:
    def other(right: Any, replica: int, ranges: Any, plan: Any) -> Any:
        mine, theirs = right(replica, ranges, plan), right(1 - replica, ranges, plan)
        return [replace(each, index=own.index) for own, each in zip(mine, theirs, strict=True)]

    wrap(patch, meshloom.data.map_data, "share_of", other)


@bug("augmented-adamw", causes="data", module="first")
def all_samples_are_augmented_alike(patch: Patch) -> None:
    right = meshloom.data.map_data.sample_seed
    patch.setattr(meshloom.data.map_data, "sample_seed", lambda seed, epoch, index: right(seed, epoch, 0))


@bug("augmented-adamw", causes="data", says="end of the epoch", module="first")
def all_epochs_are_augmented_alike(patch: Patch) -> None:
    right = meshloom.data.map_data.sample_seed
    patch.setattr(meshloom.data.map_data, "sample_seed", lambda seed, epoch, index: right(seed, 0, index))


@bug("augmented-adamw", causes="data", module="first")
def augmentation_is_not_seeded(patch: Patch) -> None:
    patch.setattr(meshloom.data.map_data, "seed_draws", lambda seed: None)


@bug(causes="data", module="first")
def samples_are_rounded_when_they_are_collated(patch: Patch) -> None:
    def rounded(right: Any, self: ChunkSource, request: Any) -> Any:
        found = right(self, request)
        return {**found, "x": found["x"].half().float()}

    wrap(patch, ChunkSource, "__getitem__", rounded)


@bug(causes="data", module="head")  # labels change no output of a module
def labels_are_those_of_the_next_sample(patch: Patch) -> None:
    def shifted(right: Any, self: ChunkSource, request: Any) -> Any:
        found = right(self, request)
        return {**found, "y": found["y"].roll(1)}

    wrap(patch, ChunkSource, "__getitem__", shifted)


@bug(causes="data|weights", module="first")
def values_change_on_their_way_to_the_device(patch: Patch) -> None:
    def changed(right: Any, tree: Any, *rest: Any) -> Any:
        found = right(tree, *rest)
        return {**found, "x": found["x"] * 1.0001} if isinstance(found, dict) and "x" in found else found

    wrap(patch, meshloom.replica.chunk_scope, "to_device", changed)


@bug("lines-adamw", causes="data", module="first")
def a_stream_loses_a_sample_between_batches(patch: Patch) -> None:
    def losing(right: Any, dataset: Any, job: Any) -> Any:
        batches = right(dataset, job)
        first = next(batches)
        yield first
        for batch in batches:
            yield [*batch[1:], batch[0]]

    wrap(patch, meshloom.data.stream_data, "stream_batches", losing)


@bug("lines-adamw", causes="data", says="end of the epoch", module="first")
def a_stream_is_not_told_of_the_second_epoch(patch: Patch) -> None:
    def deaf(right: Any, dataset: Any, job: Any) -> Any:
        class Quiet:
            def __iter__(self) -> Any:
                return iter(dataset)

        return right(Quiet(), job)

    wrap(patch, meshloom.data.stream_data, "stream_batches", deaf)


@bug(plan="dp=2,shares=2+1", causes="data", module="first")
def shares_are_exchanged(patch: Patch) -> None:
    def other(right: Any, num_samples: int, plan: Any, shares: Any = ()) -> Any:
        return right(
            num_samples, plan, tuple(reversed(plan.fixed_shares)) if hasattr(plan, "fixed_shares") else (1, 2)
        )

    wrap(patch, meshloom.data.map_data, "split_batch", other)
