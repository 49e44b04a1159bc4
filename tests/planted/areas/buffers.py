"""Bugs of buffers: running statistics, averages, counters, synchronised batch statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import meshloom.replica.buffers.batch_norm
from meshloom.replica.buffers.chunk_writes import ChunkWrites
from meshloom.replica.buffers.merged_buffers import RunningStatistics
from meshloom.replica.buffers.norm_statistics import NormStatistics, _Layer
from tests.planted.bugs import Patch, bug, wrap

SAME = "dp=2,sync_batch_norm=true"


@bug("cnn-adamw", causes="batch_statistics", module="norm")
def only_the_first_replicas_statistics_count(patch: Patch) -> None:
    wrap(
        patch,
        NormStatistics,
        "apply",
        lambda right, self, parts: right(self, parts[:1].repeat(len(parts), 1)),
    )


@bug("cnn-adamw", causes="batch_statistics", module="norm")
def statistics_are_merged_in_the_wrong_order(patch: Patch) -> None:
    wrap(patch, NormStatistics, "apply", lambda right, self, parts: right(self, parts.flip(0)))


@bug("cnn-adamw", causes="batch_statistics", module="norm")
def each_replica_keeps_its_own_statistics(patch: Patch) -> None:
    def own(right: Any, self: RunningStatistics, part: Tensor) -> Any:
        found = yield from right(self, part)
        return part[None].repeat(len(found), 1)

    wrap(patch, RunningStatistics, "_gather", own)


@bug("cnn-adamw", causes="batch_statistics", module="norm")
def running_variances_decay_twice(patch: Patch) -> None:
    def faster(right: Any, self: NormStatistics) -> Tensor:
        found = right(self)
        found[1] = found[1] ** 2
        return found

    wrap(patch, NormStatistics, "take", faster)


@bug("cnn-adamw", causes="batch_statistics", module="norm")
def batches_are_counted_by_replica(patch: Patch) -> None:
    wrap(patch, _Layer, "set_tracked", lambda right, self, count: right(self, torch.ceil(count / 2)))


@bug("cnn-adamw", causes="batch_statistics", module="norm")
def statistics_are_rounded(patch: Patch) -> None:
    def rounded(right: Any, self: NormStatistics) -> Tensor:
        return right(self).half().double()

    wrap(patch, NormStatistics, "take", rounded)


@bug("cnn-adamw", causes="batch_statistics", module="norm")
def statistics_are_not_merged(patch: Patch) -> None:
    def nothing(right: Any, self: RunningStatistics) -> Any:
        return
        yield

    patch.setattr(RunningStatistics, "finish", lambda self: nothing(None, self))


def _in_model(patch: Patch, change: Any) -> None:
    from meshloom.replica.chunk_scope import ChunkScope

    def changed(right: Any, self: ChunkScope) -> Any:
        yield from right(self)
        change(self._model)

    wrap(patch, ChunkScope, "finish", changed)


@bug("centred-adamw", causes="batch_statistics", says="average", module="the whole model")
def an_average_is_that_of_the_last_chunk(patch: Patch) -> None:
    def last(right: Any, self: ChunkWrites, parts: Tensor) -> Any:
        return right(self, parts.flip(0))

    wrap(patch, ChunkWrites, "apply", last)


@bug("centred-adamw", causes="batch_statistics", says="average", module="the whole model")
def an_average_is_off_by_a_ten_thousandth(patch: Patch) -> None:
    _in_model(patch, lambda model: model.average.mul_(1.0001))


@bug("centred-adamw", causes="batch_statistics", says="mask", module="the whole model")
def an_infinity_becomes_a_number(patch: Patch) -> None:
    _in_model(patch, lambda model: model.mask.nan_to_num_(nan=float("nan"), neginf=-1e30))


@bug("centred-adamw", causes="batch_statistics", says="seen", module="the whole model")
def a_counter_counts_once_a_step(patch: Patch) -> None:
    _in_model(patch, lambda model: model.seen.sub_(1))


@bug("cnn-adamw", SAME, causes="batch_statistics", module="norm")
def statistics_are_of_equal_weight(patch: Patch) -> None:
    def alike(right: Any, x: Tensor, group: Any) -> Any:
        count, mean, variance = right(x, group)
        return count + 1, mean, variance * (count / (count + 1))

    wrap(patch, meshloom.replica.buffers.batch_norm, "_joined_statistics", alike)


@bug(
    "cnn-adamw", SAME, causes="batch_statistics", module="conv2"
)  # the first in backward, behind the second layer of statistics
def the_gradient_through_statistics_is_this_replicas_own(patch: Patch) -> None:
    norm: Any = meshloom.replica.buffers.batch_norm._Normalise
    right = norm.backward

    def own(ctx: Any, *gradients: Tensor) -> Any:
        found = list(right(ctx, *gradients))
        if found[0] is not None:
            found[0] = found[0] - found[0].mean((0, 2, 3), keepdim=True) / 2
        return tuple(found)

    patch.setattr(norm, "backward", staticmethod(own))


@bug("cnn-adamw", SAME, causes="batch_statistics", module="norm")
def running_variances_are_biased(patch: Patch) -> None:
    wrap(
        patch, meshloom.replica.buffers.batch_norm, "_update_running",
        lambda right, module, count, mean, variance: right(module, count, mean, variance * ((count - 1) / count)),
    )  # fmt: skip
