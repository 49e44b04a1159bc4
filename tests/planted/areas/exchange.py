"""Bugs of the exchange of gradients: divisors, buckets, flags, what is sent when."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from meshloom.exchange.all_reduce import AllReduce
from meshloom.exchange.buckets.buckets import GradientBuckets
from meshloom.replica.loss_sums import LossSums
from tests.planted.bugs import Gradients, Patch, after_finish, bug, on_models, wrap

SMALL = "dp=2,microbatches=2,bucket_bytes=300"


def _one(patch: Patch, name: str, change: Any) -> None:
    """`change` what comes of one parameter's gradient."""

    def changed(exchange: Any, found: Gradients, step: int) -> None:
        if (each := found.get(name)) is not None:  # the slice that this rank owns, if it does
            found[name] = change(each)

    after_finish(patch, changed)


@bug(causes="scale|unknown", module="second")
def one_gradient_is_halved(patch: Patch) -> None:
    _one(patch, "second.weight", lambda each: each / 2)


@bug(causes="scale|unknown", module="second")
def one_gradient_has_the_wrong_sign(patch: Patch) -> None:
    _one(patch, "second.bias", lambda each: -each)


@bug(causes="scale|unknown|border", module="head")
def the_gradient_of_a_bias_is_zero(patch: Patch) -> None:
    _one(patch, "head.bias", torch.zeros_like)


@bug(causes="None_or_zero", module="second")
def a_gradient_of_zero_is_none(patch: Patch) -> None:
    _one(patch, "second.weight", lambda each: None)


@bug("unused_twice-adamw", causes="None_or_zero", module="unused")
def what_is_unused_has_a_gradient_of_zero(patch: Patch) -> None:
    def filled(exchange: Any, found: Gradients, step: int) -> None:
        for slice_ in exchange.owned:
            if found[slice_.name] is None:
                found[slice_.name] = torch.zeros(slice_.stop - slice_.start)

    after_finish(patch, filled)


@bug(causes="unknown|rounding|scale", module="second")
def one_gradient_is_off_by_three_in_a_hundred_thousand(patch: Patch) -> None:
    _one(patch, "second.weight", lambda each: each * 1.00003)


@bug(causes="unknown|rounding", module="second")
def one_gradient_has_noise_of_a_hundred_thousandth(patch: Patch) -> None:
    noise = torch.Generator().manual_seed(1)
    _one(patch, "second.weight", lambda each: each * (1 + 2e-5 * torch.randn(each.shape, generator=noise)))


@bug("scaled-adamw", causes="scale|unknown", module="branch")
def a_gradient_of_a_millionth_is_doubled(patch: Patch) -> None:
    _one(patch, "branch.weight", lambda each: each * 2)


@bug("scaled-adamw", causes="unknown|exchanged|scale", module="branch")
def a_gradient_of_a_millionth_is_another(patch: Patch) -> None:
    _one(patch, "branch.bias", lambda each: each.flip(0))


@bug("unused_twice-sgd", causes="unknown|exchanged|border", module="shared")
def a_square_gradient_is_transposed(patch: Patch) -> None:
    _one(patch, "shared.weight", lambda each: each.view(6, 6).t().reshape(-1).contiguous())


@bug(causes="border|unknown", module="first")
def the_first_five_elements_are_those_beside_them(patch: Patch) -> None:
    def rolled(each: Tensor) -> Tensor:
        each[:5] = each[1:6].clone()
        return each

    _one(patch, "first.weight", rolled)


@bug(causes="clipping", module="first")
def elements_are_limited(patch: Patch) -> None:
    _one(patch, "first.weight", lambda each: each.clamp(-0.003, 0.003))


@bug(causes="rounding", module="first")
def one_bucket_is_rounded_to_half_precision(patch: Patch) -> None:
    _one(patch, "first.weight", lambda each: each.half().to(each.dtype))


@bug(causes="stale|unknown", module="head")
def one_gradient_is_that_of_the_step_before(patch: Patch) -> None:
    before: dict[int, Tensor] = {}

    def late(exchange: Any, found: Gradients, step: int) -> None:
        now = found["head.weight"]
        assert now is not None
        last = before.get(id(exchange))
        before[id(exchange)] = now.clone()
        found["head.weight"] = now if last is None else last

    after_finish(patch, late)


@bug(causes="scale|stale|unknown", module="head")
def gradients_gather_over_steps(patch: Patch) -> None:
    before: dict[int, Tensor] = {}

    def gathered(exchange: Any, found: Gradients, step: int) -> None:
        now = found["head.weight"]
        assert now is not None
        if id(exchange) in before:
            now += before[id(exchange)]
        before[id(exchange)] = now.clone()

    after_finish(patch, gathered)


@bug(plan="dp=3", causes="missing_chunk|not_reduced", module="head")
def the_last_replica_sends_zeros(patch: Patch) -> None:
    def silent(right: Any, self: AllReduce, bucket: Any) -> None:
        if self._group.rank == 2:
            bucket.flat[: bucket.length].zero_()
        right(self, bucket)

    wrap(patch, AllReduce, "_start", silent)


@bug(causes="unknown|missing_chunk|reduced_twice|microbatches", module="head")
def a_replica_counts_twice(patch: Patch) -> None:
    def louder(right: Any, self: AllReduce, bucket: Any) -> None:
        if self._group.rank == 1:
            bucket.flat[: bucket.length].mul_(2)
        right(self, bucket)

    wrap(patch, AllReduce, "_start", louder)


@bug(causes="unknown|microbatches|missing_chunk", module="head")
def a_replica_is_subtracted(patch: Patch) -> None:
    def negative(right: Any, self: AllReduce, bucket: Any) -> None:
        if self._group.rank == 1:
            bucket.flat[: bucket.length].neg_()
        right(self, bucket)

    wrap(patch, AllReduce, "_start", negative)


@bug(plan=SMALL, causes="border|unknown|missing_chunk|not_reduced", module="first")
def the_tail_of_a_bucket_is_not_sent(patch: Patch) -> None:
    def shorter(right: Any, self: AllReduce, bucket: Any) -> None:
        if self._group.rank == 1 and any(entry.name == "first.weight" for entry in bucket.entries):
            entry = next(entry for entry in bucket.entries if entry.name == "first.weight")
            bucket.flat[entry.stop - 7 : entry.stop].zero_()
        right(self, bucket)

    wrap(patch, AllReduce, "_start", shorter)


@bug(plan=SMALL, causes="missing_chunk|not_reduced|microbatches|unknown", module="head")
def a_bucket_leaves_before_its_last_gradient(patch: Patch) -> None:
    """Of the last chunk."""

    def early(right: Any, self: GradientBuckets, bucket: Any, entry: Any, view: Tensor) -> Any:
        ready = right(self, bucket, entry, view)

        def dropped(parameter: Any) -> None:
            if (
                self._last_chunk
                and entry.name == "head.weight"
                and parameter.grad is not None
                and entry.arrived
            ):
                parameter.grad = torch.zeros_like(parameter.grad)
            ready(parameter)

        return dropped

    wrap(patch, GradientBuckets, "_ready_of", early)


@bug("gpt-adamw", causes="scale|unknown", module=None)
def the_divisor_is_this_replicas_own(patch: Patch) -> None:
    def own(right: Any, self: LossSums, batch: int) -> Any:
        return right(self, batch) / 2

    wrap(patch, LossSums, "divisor", own)


@bug("gpt-adamw", causes="scale", module=None)
def the_divisor_is_one_too_many(patch: Patch) -> None:
    wrap(patch, LossSums, "divisor", lambda right, self, batch: right(self, batch) + 1)


@bug("gpt-adamw", causes="tied", module="embed")
def a_tied_gradient_is_missing_on_one_replica(patch: Patch) -> None:
    """The head of replica 1 adds nothing to the gradient of the embedding."""

    def detached(model: Any, replica: int) -> None:
        if replica == 1:
            model.head.forward = lambda x: F.linear(x, model.head.weight.detach())

    on_models(patch, detached)


@bug(causes="stale", module="first")
def a_layer_computes_with_the_weights_of_before_the_last_update(patch: Patch) -> None:
    def stale(model: Any, replica: int) -> None:
        kept: list[Tensor] = [each.detach().clone() for each in model.first.parameters()]
        now: list[Tensor] = [each.detach().clone() for each in model.first.parameters()]

        def forward(x: Tensor) -> Tensor:
            if model.training and any(
                not torch.equal(a, b) for a, b in zip(now, model.first.parameters(), strict=True)
            ):
                for old, newer, newest in zip(kept, now, model.first.parameters(), strict=True):
                    old.copy_(newer)
                    newer.copy_(newest.detach())
            weight, bias = (
                each + (old - each).detach() for each, old in zip(model.first.parameters(), kept, strict=True)
            )
            return F.linear(x, weight, bias)

        model.first.forward = forward

    on_models(patch, stale)


@bug(causes="stale", module="second")
def one_replica_computes_with_the_first_weights(patch: Patch) -> None:
    def stale(model: Any, replica: int) -> None:
        first = [each.detach().clone() for each in model.second.parameters()]

        def forward(x: Tensor) -> Tensor:
            old = torch.is_grad_enabled()
            return F.linear(
                x,
                *(
                    now + (then - now).detach() * old
                    for now, then in zip(model.second.parameters(), first, strict=True)
                ),
            )

        if replica == 1:
            model.second.forward = forward

    on_models(patch, stale)
