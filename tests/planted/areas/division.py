"""Bugs of operators divided over ranks (tp): sums, gathers, shards, what all ranks hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import meshloom.program.operators.collectives as collectives
from meshloom.core.plan import Plan
from meshloom.parameters.shards import Shards
from tests.planted.bugs import Patch, after_finish, bug, wrap

# the first layer's rows, the second one's columns
PARTS = "tp=2,tp_placements=first.weight:dim0+second.weight:dim1"
ROWS = "tp=2,tp_placements=first.weight:dim0+second.weight:dim0"
BOTH = f"dp=2,{PARTS}"
assert Plan.parse(PARTS).tp == 2


def _sum(patch: Patch, change: Any) -> None:
    """Changes what a sum over ranks gives."""

    def changed(right: Any, after: Any, group: Any, value: Tensor, **settings: Any) -> Any:
        finish = right(after, group, value, **settings)
        return lambda: change(finish(), group, value)

    wrap(patch, collectives, "start_sum", changed)


@bug("mlp-sgd", PARTS, causes="division|replicas", module="second")
def partial_sums_are_not_added_up(patch: Patch) -> None:
    _sum(patch, lambda total, group, mine: mine.clone() if mine.shape == total.shape else total)


@bug("mlp-sgd", PARTS, causes="division", module="second")
def sums_are_doubled(patch: Patch) -> None:
    _sum(patch, lambda total, group, mine: total * 2)


@bug("mlp-sgd", PARTS, causes="division", module="second")
def sums_are_means(patch: Patch) -> None:
    _sum(patch, lambda total, group, mine: total / 2)


@bug("mlp-sgd", PARTS, causes="division", module="second")
def sums_are_rounded(patch: Patch) -> None:
    _sum(patch, lambda total, group, mine: total.bfloat16().to(total.dtype))


@bug("mlp-sgd", PARTS, causes="division", module="second")
def sums_are_off_by_three_in_a_hundred_thousand(patch: Patch) -> None:
    _sum(patch, lambda total, group, mine: total * 1.00003)


@bug("mlp-sgd", PARTS, causes="division", module="second")
def the_last_element_of_a_sum_is_lost(patch: Patch) -> None:
    def lost(total: Tensor, group: Any, mine: Tensor) -> Tensor:
        total = total.clone()
        total.view(-1)[-1:] = 0
        return total

    _sum(patch, lost)


def _gradient(patch: Patch, change: Any) -> None:
    def changed(right: Any, transition: Any, group: Any, gradient: Tensor) -> Any:
        return change(right(transition, group, gradient), transition, group)

    wrap(patch, collectives, "_gradient", changed)


@bug("mlp-sgd", PARTS, causes="division|replicas|scale", module="second")
def gradients_through_collectives_are_doubled(patch: Patch) -> None:
    _gradient(patch, lambda gradient, transition, group: gradient * 2)


@bug("mlp-sgd", PARTS, causes="division|replicas", module="second")
def gradients_through_collectives_are_those_of_rank_0(patch: Patch) -> None:
    _gradient(
        patch, lambda gradient, transition, group: gradient if group.rank == 0 else torch.zeros_like(gradient)
    )


@bug("mlp-sgd", ROWS, causes="division", module="first")
def gathered_parts_are_in_the_wrong_order(patch: Patch) -> None:
    def exchanged(right: Any, before: Any, group: Any, value: Tensor) -> Any:
        finish = right(before, group, value)

        def turned() -> Tensor:
            whole = finish()
            return whole.flip(-1)

        return turned

    wrap(patch, collectives, "start_gather", exchanged)


@bug("mlp-sgd", PARTS, causes="division|saved", module=None)
def shards_begin_one_row_late(patch: Patch) -> None:
    wrap(
        patch, Shards, "take",
        lambda right, self, name, whole: torch.roll(right(self, name, whole), 1) if name == "second.weight" else right(self, name, whole),
    )  # fmt: skip


@bug("mlp-sgd", PARTS, causes="clipping|division", module=None)
def what_all_ranks_hold_counts_on_each_in_the_norm(patch: Patch) -> None:
    patch.setattr(Shards, "speaks_for", lambda self, name: True)


@bug("mlp-sgd", PARTS, causes="replicas", module=None)
def what_all_ranks_hold_drifts_on_one(patch: Patch) -> None:
    from meshloom.replica.replica import Replica

    def drifting(right: Any, self: Replica, found: Any) -> Any:
        result = yield from right(self, found)
        if self.context.place.tp == 1:
            _, each = next(
                (name, each) for name, each in self.model.named_parameters() if name not in self.shards.pieces
            )
            with torch.no_grad():
                each.mul_(1.0001)
        return result

    wrap(patch, Replica, "update", drifting)


@bug("mlp-sgd", BOTH, causes="scale|reduced_twice", module="second")
def one_shard_is_not_averaged_over_replicas(patch: Patch) -> None:
    def halved(exchange: Any, found: Any, step: int) -> None:
        each = found.get("second.weight")
        if each is not None:
            each.mul_(2)

    after_finish(patch, halved)


@bug("mlp-adamw", BOTH, says="exp_avg of second.weight", causes="optimizer", module=None)
def state_of_a_shard_is_saved_from_the_wrong_rows(patch: Patch) -> None:
    from meshloom.optimizer.state_pieces import StateShard

    def shifted(right: Any, self: StateShard) -> Any:
        from dataclasses import replace

        found = right(self)
        return (
            replace(found, tensor=torch.roll(found.tensor, 1))
            if "second.weight/exp_avg" in self.key
            else found
        )

    wrap(patch, StateShard, "piece", shifted)
