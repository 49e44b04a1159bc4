"""Bugs of accumulation and of the exchange of gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import meshloom.exchange.all_reduce
import meshloom.exchange.buckets.buckets as buckets
import meshloom.exchange.server
import meshloom.exchange.sparse_gradients as sparse
from meshloom.exchange.all_reduce import AllReduce
from meshloom.replica.loss_sums import LossSums
from tests.planted.bugs import Gradients, Patch, after_finish, bug, wrap


@bug("long-adamw", causes="exchanged|unknown", module="blocks.1.out")
def gradients_of_two_blocks_are_exchanged(patch: Patch) -> None:
    def swapped(exchange: Any, found: Gradients, step: int) -> None:
        one, other = found["blocks.0.out.weight"], found["blocks.1.out.weight"]
        assert one is not None and other is not None
        found["blocks.0.out.weight"], found["blocks.1.out.weight"] = other.clone(), one.clone()

    after_finish(patch, swapped)


def _adding(patch: Patch, add: Any) -> None:
    """Changes how a chunk's gradient is added to those before it."""

    def added(right: Any, view: Tensor, gradient: Tensor, *, filled: bool) -> None:
        add(view, gradient) if filled and gradient.data_ptr() != view.data_ptr() else right(
            view, gradient, filled=filled
        )

    wrap(patch, buckets, "add_gradient", added)


@bug("two-sgd", "dp=2,microbatches=3", causes="microbatches|missing_chunk", module="head")
@bug("convolutions-adamw", causes="microbatches|missing_chunk", module="head")
def a_chunks_gradient_replaces_those_before_it(patch: Patch) -> None:
    _adding(patch, lambda view, gradient: view.copy_(gradient))


@bug("two-sgd", "dp=2,microbatches=3", causes="microbatches|missing_chunk|stale|unknown", module="head")
def the_gradients_of_earlier_chunks_count_twice(patch: Patch) -> None:
    _adding(patch, lambda view, gradient: view.mul_(2).add_(gradient))


@bug("two-adamw", "dp=2,microbatches=3", causes="rounding|unknown", module="head")
@bug("long-adamw", causes="rounding|unknown", module=None)
def gradients_are_accumulated_in_half_precision(patch: Patch) -> None:
    _adding(patch, lambda view, gradient: view.copy_((view.bfloat16() + gradient.bfloat16()).to(view.dtype)))


@bug("branch-adamw", "dp=2", causes="None_or_zero|replicas", module=None)
def what_others_use_has_no_gradient_here(patch: Patch) -> None:
    patch.setattr(meshloom.exchange.all_reduce, "used_anywhere", lambda arrived, flags: list(arrived))


@bug("convolutions-adamw", causes="scale|unknown", module="head")
def gradients_of_biases_are_added_up_and_not_averaged(patch: Patch) -> None:
    def doubled(exchange: Any, found: Gradients, step: int) -> None:
        for each in exchange.owned:
            gradient = found[each.name]
            if each.name.endswith("bias") and gradient is not None:
                gradient.mul_(2)

    after_finish(patch, doubled)


@bug("two-adamw", says="end of the epoch", causes="scale", module=None)
def the_short_batch_is_divided_by_the_full_one(patch: Patch) -> None:
    def shorter(right: Any, self: LossSums, returned: Any, chunk: Any) -> Any:
        return right(self, returned, replace(chunk, batch=13))

    wrap(patch, LossSums, "add", shorter)


@bug("two-adamw", "dp=2,microbatches=2", causes="mean_of_means|unknown|weights", module=None)
def chunks_of_other_sizes_count_alike(patch: Patch) -> None:
    def alike(right: Any, self: LossSums, returned: Any, chunk: Any) -> Any:
        root, loss, weight = right(self, returned, chunk)
        return root * (chunk.batch / 4 / chunk.samples), loss, weight

    wrap(patch, LossSums, "add", alike)


@bug("two-adamw", "dp=2", causes="stale|unknown", module="head")
def one_replica_sends_what_it_had_a_step_before(patch: Patch) -> None:
    kept: dict[int, Tensor] = {}

    def late(right: Any, self: AllReduce, bucket: Any) -> None:
        if self._group.rank == 1:
            now = bucket.flat[: bucket.length].clone()
            if id(bucket) in kept:
                bucket.flat[: bucket.length].copy_(kept[id(bucket)])
            kept[id(bucket)] = now
        right(self, bucket)

    wrap(patch, AllReduce, "_start", late)


@bug("scaled-adamw", causes="scale|unknown|limited|clipping|border|None_or_zero", module="branch")
def tiny_gradients_become_zero(patch: Patch) -> None:
    def flushed(exchange: Any, found: Gradients, step: int) -> None:
        for each in found.values():
            if each is not None:
                each[each.abs() < 1e-6] = 0

    after_finish(patch, flushed)


@bug("long-adamw", "dp=2", causes="border|unknown|not_reduced|missing_chunk", module="embed")
def a_row_of_the_embedding_is_not_added_up(patch: Patch) -> None:
    def alone(right: Any, self: AllReduce, bucket: Any) -> None:
        if self._group.rank == 1:
            for entry in bucket.entries:
                if entry.name == "embed.weight":
                    bucket.flat[entry.start + 45 : entry.start + 54].zero_()
        right(self, bucket)

    wrap(patch, AllReduce, "_start", alone)


@bug("texts-adamw", "dp=2", causes="exchanged|unknown|missing_chunk", module="blocks.1.norm")
def one_replica_puts_two_gradients_in_each_others_place(patch: Patch) -> None:
    def swapped(right: Any, self: AllReduce, bucket: Any) -> None:
        at = {entry.name: slice(entry.start, entry.stop) for entry in bucket.entries}
        names = ("blocks.0.norm.weight", "blocks.1.norm.weight")
        if self._group.rank == 1 and all(name in at for name in names):
            one, other = (bucket.flat[at[name]].clone() for name in names)
            bucket.flat[at[names[0]]], bucket.flat[at[names[1]]] = other, one
        right(self, bucket)

    wrap(patch, AllReduce, "_start", swapped)


@bug("convolutions-adamw", causes="unknown|rounding", module="head")
def the_second_steps_gradient_is_noisy(patch: Patch) -> None:
    noise = torch.Generator().manual_seed(2)

    def noisy(exchange: Any, found: Gradients, step: int) -> None:
        each = found["head.weight"]
        if step == 1 and each is not None:
            each.mul_(1 + 1e-4 * torch.randn(each.shape, generator=noise, dtype=each.dtype))

    after_finish(patch, noisy)


@bug("two-adamw", "dp=3,exchange=server,servers=2", causes="missing_chunk|not_reduced", module="head")
def servers_leave_out_the_last_worker(patch: Patch) -> None:
    def without(self: Any) -> list[Tensor]:
        for pushed in self._pushed:
            for theirs in pushed[1:-1]:
                pushed[0].add_(theirs)
        return [pushed[0] for pushed in self._pushed]

    patch.setattr(meshloom.exchange.server.Server, "_add_up", without)


@bug("table-adamw", causes="missing_chunk|not_reduced|border|unknown", module="table")
@bug("table-adamw", "dp=2,zero=1", causes="missing_chunk|not_reduced|border|unknown", module="table")
def rows_that_two_replicas_use_are_not_added_up(patch: Patch) -> None:
    def last(right: Any, rows: Tensor, values: Tensor, parameter: Tensor) -> Tensor:
        newest = {int(row): number for number, row in enumerate(rows)}
        kept = torch.tensor(sorted(newest.values()), dtype=torch.int64)
        return right(rows[kept], values[kept], parameter)

    def finish(right: Any, self: Any) -> Tensor:
        with patch.context() as within:
            wrap(within, sparse, "_coalesced", last)
            return right(self)

    wrap(patch, sparse._Rows, "finish", finish)


@bug("table-adamw", causes="exchanged|border|unknown", module="table")
def rows_of_the_second_replica_are_off_by_one(patch: Patch) -> None:
    def shifted(right: Any, self: Any, mine: Any, parameter: Any, counts: Any, group: Any) -> None:
        if mine is not None and group.rank == 1:
            rows = (mine.indices() + 1) % len(parameter)
            mine = torch.sparse_coo_tensor(rows, mine.values(), mine.shape).coalesce()
        right(self, mine, parameter, counts, group)

    wrap(patch, sparse._Rows, "__init__", shifted)


@bug("table-adamw", causes="optimizer|border|unknown|None_or_zero", module="table")
def all_rows_count_as_used(patch: Patch) -> None:
    def everything(right: Any, self: Any, owned: Any) -> Any:
        found = right(self, owned)
        if found is None or found.layout == torch.strided:
            return found
        dense = found.to_dense()
        rows = torch.arange(len(dense))[None]
        return torch.sparse_coo_tensor(rows, dense, dense.shape).coalesce()

    wrap(patch, sparse.WithSparse, "_of_slice", everything)
