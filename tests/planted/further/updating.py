"""Bugs of updates: optimizers, clipping, averages, several losses, frozen parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import meshloom.optimizer.clipping as clipping
import meshloom.replica.replica as replicas
from meshloom.core.losses.frozen import FrozenParameters
from meshloom.optimizer.averages import ParameterAverages
from meshloom.optimizer.updater import Updater
from meshloom.replica.loss_sums import LossSums
from tests.planted.bugs import Patch, around_update, bug, groups_of, wrap


@bug("two-adamw", causes="optimizer|scale|unknown", module="first")
@bug("convolutions-adamw", "dp=2,zero=2", causes="optimizer|scale|unknown", module="conv")
def decay_is_added_to_gradients(patch: Patch) -> None:
    """In place of moving the parameters by it."""
    kept: list[tuple[dict[str, Any], float]] = []

    def take(right: Any, self: Updater, gradients: Any) -> Any:
        norm = yield from right(self, gradients)
        for group in groups_of(self):
            for each in group["params"]:
                if each.grad is not None:
                    each.grad.add_(each.detach(), alpha=group["weight_decay"])
            kept.append((group, group["weight_decay"]))
            group["weight_decay"] = 0.0
        return norm

    def restore(updater: Updater, number: int) -> None:
        for group, decay in kept:
            group["weight_decay"] = decay
        kept.clear()

    wrap(patch, Updater, "_take", take)
    around_update(patch, after=restore)


@bug("two-adamw", causes="optimizer|rounding", module="first")
@bug("long-sgd", "dp=2,zero=1", causes="optimizer|rounding", module=None)
def updates_are_rounded(patch: Patch) -> None:
    before: dict[int, Tensor] = {}

    def keep(updater: Updater, number: int) -> None:
        for group in groups_of(updater):
            before.update({id(each): each.detach().clone() for each in group["params"]})

    def rounded(updater: Updater, number: int) -> None:
        with torch.no_grad():
            for group in groups_of(updater):
                for each in group["params"]:
                    was = before[id(each)]
                    each.copy_(was + (each - was).bfloat16().to(was.dtype))

    around_update(patch, keep, rounded)


@bug("texts-sgd", causes="clipping|tied", module=None)
def what_is_tied_counts_twice_in_the_norm(patch: Patch) -> None:
    def twice(right: Any, gradients: Any, device: Any) -> Tensor:
        given = list(gradients)
        return right(
            [*given, *(each for each in given if each is not None and each.numel() == 29 * 15)], device
        )

    wrap(patch, clipping, "sum_of_squares", twice)


@bug("two-sgd", "dp=2", causes="clipping|scale|optimizer", module=None)
def norms_are_of_half_precision(patch: Patch) -> None:
    wrap(
        patch, clipping, "sum_of_squares", lambda right, *given: right(*given).sqrt().half().double().square()
    )


@bug("convolutions-sgd", "dp=2,zero=1", causes="clipping|optimizer|scale|unknown", module=None)
def each_owner_clips_by_its_own_norm(patch: Patch) -> None:
    right = clipping.clip

    def own(gradients: Any, largest: float, owners: Any, *rest: Any, **settings: Any) -> Any:
        return (yield from right(gradients, largest, None, *rest, **settings))

    patch.setattr("meshloom.optimizer.updater.clip", own)


@bug("two-sgd", causes="clipping|loss|unknown", module=None)
def the_norm_is_told_after_clipping(patch: Patch) -> None:
    def smaller(right: Any, self: Updater, *given: Any, **settings: Any) -> Any:
        norm = yield from right(self, *given, **settings)
        return None if norm is None else norm.clamp(max=0.25)

    wrap(patch, Updater, "update", smaller)


@bug("unused_twice-adamw", causes="optimizer", says="unused.weight", module="unused")
def what_is_unused_decays(patch: Patch) -> None:
    def decayed(self: Updater, number: int) -> None:
        with torch.no_grad():
            for group in groups_of(self):
                for each in group["params"]:
                    if each.shape == (4, 3):
                        each.mul_(1 - group["lr"] * group["weight_decay"])

    around_update(patch, after=decayed)


@bug("lbfgs-sgd", "dp=2", causes="optimizer|scale", module=None)
def later_evaluations_of_a_closure_count_twice(patch: Patch) -> None:
    right = replicas._evaluated

    def doubled(self: Any, found: Any) -> Any:
        gradients, loss = yield from right(self, found)
        return [None if each is None else each * 2 for each in gradients], loss

    patch.setattr(replicas, "_evaluated", doubled)


@bug("averaged_two-adamw", causes="averages", module="first")
@bug("averaged_long-adamw", "dp=2,zero=1", causes="averages", module=None)
def averages_are_of_the_parameters_before(patch: Patch) -> None:
    kept: dict[int, list[Tensor]] = {}

    def late(right: Any, self: ParameterAverages) -> None:
        owned = [each.data() for each in self._exchange.owned]
        now = [each.clone() for each in owned]
        for each, before in zip(owned, kept.get(id(self), now), strict=True):
            each.copy_(before)
        right(self)
        for each, newest in zip(owned, now, strict=True):
            each.copy_(newest)
        kept[id(self)] = now

    wrap(patch, ParameterAverages, "update", late)


@bug("averaged_convolutions-adamw", causes="averages", module="conv")
def averages_leave_out_every_second_step(patch: Patch) -> None:
    counts: dict[int, int] = {}

    def seldom(right: Any, self: ParameterAverages) -> None:
        counts[id(self)] = counts.get(id(self), 0) + 1
        if counts[id(self)] % 2:
            right(self)

    wrap(patch, ParameterAverages, "update", seldom)


@bug("duel-adamw", causes="turns", module=None)
def the_turn_of_the_generator_is_the_critics(patch: Patch) -> None:
    def stays(right: Any, job: Any, step: int) -> Any:
        return [replace(each, loss="critic", number=0) for each in right(job, step)]

    wrap(patch, replicas, "turns_of", stays)


@bug("duel-adamw", causes="turns", module=None)
def the_critic_takes_one_turn_of_two(patch: Patch) -> None:
    wrap(
        patch, replicas, "turns_of",
        lambda right, job, step: [each for each in right(job, step) if (each.loss, each.draws) != ("critic", 1)],
    )  # fmt: skip


@bug("duel-adamw", causes="same_draws", module=None)
def both_turns_of_the_critic_draw_the_same_noise(patch: Patch) -> None:
    import meshloom.replica.chunk_scope as chunk_scope

    wrap(patch, chunk_scope, "seed_of_turn", lambda right, seed, draws: seed)


@bug("thawed-adamw", causes="None_or_zero|optimizer", module="first")
def what_is_frozen_has_a_gradient_of_zero(patch: Patch) -> None:
    def zeros(right: Any, self: FrozenParameters, step: int, names: Any, gradients: list[Any]) -> list[Any]:
        frozen, names = self.at(step), list(names)
        found = right(self, step, names, gradients)
        return [
            torch.zeros_like(before) if name in frozen and before is not None else each
            for name, before, each in zip(names, gradients, found, strict=True)
        ]

    def trained(right: Any, self: FrozenParameters, step: int, named: Any) -> Any:
        return right(self, step, [])

    wrap(patch, FrozenParameters, "dropped", zeros)
    wrap(patch, FrozenParameters, "without_gradients", trained)


@bug("thawed-adamw", "dp=2,zero=1", causes="None_or_zero|optimizer|frozen", module="first")
@bug("thawed-adamw", "pp=2,microbatches=2", causes="None_or_zero|optimizer|frozen", module="first")
def what_was_frozen_thaws_a_step_late(patch: Patch) -> None:
    wrap(patch, FrozenParameters, "at", lambda right, self, step: right(self, max(0, step - 1)))


@bug("logging-adamw", causes="loss|logged|unknown", module=None)
@bug("logging-adamw", "pp=2,microbatches=2", causes="loss|logged|unknown", module=None)
def what_is_logged_is_the_sum(patch: Patch) -> None:
    def sums(right: Any, self: LossSums, name: str, value: Any, weight: Any) -> None:
        right(self, name, value * weight, weight)

    wrap(patch, LossSums, "_add_logged", sums)
