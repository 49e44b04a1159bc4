"""Bugs of lower precision: copies that are updated, scales, autocast."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from meshloom.exchange.all_reduce import AllReduce
from meshloom.optimizer.bfloat16.masters import Masters, WithMasters
from meshloom.replica.loss_sums import LossSums
from tests.planted.bugs import Gradients, Patch, after_finish, bug, wrap

LOW, MIXED, HALF = (
    "dp=2,precision=bf16",
    "dp=2,microbatches=2,precision=bf16-mixed",
    "dp=2,precision=fp16-mixed",
)


@bug(plan=LOW, causes="optimizer|replicas", module=None)
def copies_are_rounded_with_the_parameters(patch: Patch) -> None:
    def rounded(right: Any, self: Masters) -> None:
        right(self)
        for master, _ in self.copies():
            master.data().copy_(master.data().bfloat16())

    wrap(patch, Masters, "publish", rounded)


@bug(plan=LOW, causes="rounding|stale", module=None)
def parameters_keep_their_old_values(patch: Patch) -> None:
    counts: dict[int, int] = {}

    def once(right: Any, self: Masters) -> None:
        counts[id(self)] = counts.get(id(self), 0) + 1
        if counts[id(self)] % 2:
            right(self)

    wrap(patch, Masters, "publish", once)


@bug(plan=LOW, causes="rounding|optimizer", module=None)
def values_are_cut_off_and_not_rounded(patch: Patch) -> None:
    def cut(right: Any, self: Masters) -> None:
        right(self)
        for master, slice_ in self.copies():
            value = master.data()
            low = value.view(torch.int32).bitwise_and(-65536).view(torch.float32)
            slice_.parameter.data.copy_(low.view(slice_.parameter.shape))

    wrap(patch, Masters, "publish", cut)


@bug(plan=LOW, causes="optimizer|scale", module="head")  # the first in backward
def gradients_for_copies_are_halved(patch: Patch) -> None:
    def halved(right: Any, self: WithMasters, weight: Any) -> Any:
        found = yield from right(self, weight)
        return [each if each is None else each / 2 for each in found]

    wrap(patch, WithMasters, "finish", halved)


@bug(plan=MIXED, causes="scale|unknown", module="second")
def one_gradient_under_autocast_is_off_by_a_hundredth(patch: Patch) -> None:
    def changed(exchange: Any, found: Gradients, step: int) -> None:
        each = found["second.weight"]
        assert each is not None
        found["second.weight"] = each * 1.01

    after_finish(patch, changed)


@bug(plan=MIXED, causes="rounding", module=None)
def gradients_are_rounded_as_they_leave(patch: Patch) -> None:
    def rounded(right: Any, self: AllReduce, bucket: Any) -> None:
        bucket.flat.copy_(bucket.flat.bfloat16())
        right(self, bucket)

    wrap(patch, AllReduce, "_start", rounded)


@bug(plan=MIXED, causes="rounding|unknown|stale|scale", module="first")
def nothing_is_computed_under_autocast(patch: Patch) -> None:
    patch.setattr("meshloom.replica.replica.in_precision", lambda job, plan: job)


@bug("mlp-sgd", HALF, causes="scale", module=None)
def the_scale_is_divided_out_twice(patch: Patch) -> None:
    def twice(right: Any, self: LossSums, batch: int) -> Any:
        return right(self, batch) * 2

    wrap(patch, LossSums, "divisor", twice)


@bug("mlp-sgd", HALF, causes="scale|stale", module=None)
def the_scale_changes_between_loss_and_division(patch: Patch) -> None:
    def grown(right: Any, self: LossSums, batch: int) -> Any:
        assert self.scale is not None
        self.scale = replace(self.scale, scale=self.scale.scale * 2)
        return right(self, batch)

    wrap(patch, LossSums, "divisor", grown)


@bug("mlp-sgd", "dp=2,reduce=bf16", causes="scale|unknown|rounding", module="second")
def one_gradient_that_travels_rounded_is_off_by_a_tenth(patch: Patch) -> None:
    def changed(exchange: Any, found: Gradients, step: int) -> None:
        each = found["second.weight"]
        assert each is not None
        found["second.weight"] = each * 1.1

    after_finish(patch, changed)
