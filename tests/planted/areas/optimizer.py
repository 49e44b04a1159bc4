"""Bugs of updates: settings, state, clipping, schedules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import meshloom.optimizer.updater
from meshloom.optimizer.updater import Updater
from tests.planted.bugs import Patch, around_update, bug, groups_of, states_of, wrap


def _settings(patch: Patch, change: Any, step: int = 0) -> None:
    """Changes the settings of all groups before the update of this number."""

    def changed(updater: Any, number: int) -> None:
        if number == step:
            for group in groups_of(updater):
                change(group)

    around_update(patch, changed)


@bug(causes="optimizer", says="lr", module="first")
def the_learning_rate_is_off_by_a_thousandth(patch: Patch) -> None:
    _settings(patch, lambda group: group.update(lr=group["lr"] * 1.001))


@bug("mlp-adafactor", causes="optimizer", module="first")
def the_learning_rate_of_a_factored_optimizer_is_off(patch: Patch) -> None:
    _settings(patch, lambda group: group.update(lr=group["lr"] * 1.01))


@bug(causes="optimizer", module="first")
def weight_decay_is_left_out(patch: Patch) -> None:
    _settings(patch, lambda group: group.update(weight_decay=0.0))


@bug(causes="optimizer", module="first")
def biases_decay(patch: Patch) -> None:
    _settings(patch, lambda group: group.update(weight_decay=0.1))


@bug(causes="optimizer", module="first")
def betas_are_exchanged(patch: Patch) -> None:
    _settings(patch, lambda group: group.update(betas=(group["betas"][1], group["betas"][0])))


@bug(causes="optimizer", module="first")
def epsilon_is_larger(patch: Patch) -> None:
    _settings(patch, lambda group: group.update(eps=1e-5))


@bug(causes="optimizer", module="first")
def the_largest_second_moment_is_used(patch: Patch) -> None:
    _settings(patch, lambda group: group.update(amsgrad=True))


@bug("mlp-sgd", causes="optimizer", module="first")
def momentum_is_nesterovs(patch: Patch) -> None:
    _settings(patch, lambda group: group.update(nesterov=True))


@bug("mlp-sgd", causes="optimizer", module="first")
def momentum_is_dampened(patch: Patch) -> None:
    _settings(patch, lambda group: group.update(dampening=0.1))


@bug("mlp-sgd", causes="optimizer", module="first")
def updates_climb(patch: Patch) -> None:
    _settings(patch, lambda group: group.update(maximize=True))


def _states(patch: Patch, change: Any) -> None:
    def changed(updater: Any, number: int) -> None:
        for state in states_of(updater):
            change(state)

    around_update(patch, after=changed)


@bug(causes="optimizer", says="step of", module=None)
def steps_are_not_counted(patch: Patch) -> None:
    _states(patch, lambda state: state["step"].zero_())


@bug(causes="optimizer", says="step of", module=None)
def steps_are_counted_twice(patch: Patch) -> None:
    _states(patch, lambda state: state["step"].add_(1))


@bug(says="exp_avg of", causes="optimizer", module=None)
def momentum_is_forgotten(patch: Patch) -> None:
    _states(patch, lambda state: state["exp_avg"].zero_())


@bug("mlp-sgd", says="momentum_buffer of", causes="optimizer", module=None)
def momentum_is_forgotten_by_sgd(patch: Patch) -> None:
    _states(patch, lambda state: state["momentum_buffer"].zero_())


@bug(says="exp_avg_sq of", causes="optimizer", module=None)
def second_moments_are_those_of_the_absolute_value(patch: Patch) -> None:
    _states(patch, lambda state: state["exp_avg_sq"].sqrt_())


@bug(says="exp_avg_sq of", causes="optimizer", module=None)
def second_moments_are_rounded(patch: Patch) -> None:
    _states(patch, lambda state: state["exp_avg_sq"].copy_(state["exp_avg_sq"].bfloat16().float()))


@bug(says="exp_avg of", causes="optimizer", module=None)
def states_of_two_parameters_are_exchanged(patch: Patch) -> None:
    def swapped(updater: Any, number: int) -> None:
        states = [each for each in states_of(updater) if each["exp_avg"].ndim == 1]
        small, large = sorted(states[:2], key=lambda each: each["exp_avg"].numel())
        small["exp_avg"].copy_(large["exp_avg"][: small["exp_avg"].numel()])

    around_update(patch, after=swapped)


@bug(causes="optimizer", module="second")
def a_bias_is_never_updated(patch: Patch) -> None:
    def left_out(right: Any, self: Updater, gradients: Any) -> Any:
        norm = yield from right(self, gradients)
        for slice_, target in zip(self._exchange.owned, self._assignment.targets, strict=True):
            if slice_.name == "second.bias" and target is not None:
                target.grad = None
        return norm

    wrap(patch, Updater, "_take", left_out)


@bug(causes="optimizer", module="second")
def only_the_first_half_is_updated(patch: Patch) -> None:
    kept: dict[int, Tensor] = {}

    def value(updater: Any) -> Tensor:
        return next(each.parameter.data for each in updater._exchange.owned if each.name == "second.weight")

    around_update(
        patch,
        lambda updater, step: kept.update({id(updater): value(updater).clone()}),
        lambda updater, step: value(updater)[5:].copy_(kept[id(updater)][5:]),  # type: ignore[func-returns-value]
    )


@bug(causes="optimizer", module="first")
def the_update_uses_a_neighbours_gradient(patch: Patch) -> None:
    def mixed(right: Any, self: Updater, gradients: Any) -> Any:
        norm = yield from right(self, gradients)
        for slice_, target in zip(self._exchange.owned, self._assignment.targets, strict=True):
            if slice_.name == "first.bias" and target is not None and target.grad is not None:
                target.grad = torch.roll(target.grad, 1)
        return norm

    wrap(patch, Updater, "_take", mixed)


@bug("unused_twice-adamw", says="frozen.bias differs", module=None)
def what_is_frozen_moves(patch: Patch) -> None:
    from meshloom.replica.replica import Replica

    def moved(right: Any, self: Replica, found: Any) -> Any:
        result = yield from right(self, found)
        with torch.no_grad():
            self.model.get_parameter("frozen.bias").add_(1e-5)
        return result

    wrap(patch, Replica, "update", moved)


def _clip(patch: Patch, new: Any) -> None:
    wrap(patch, meshloom.optimizer.updater, "clip", new)


@bug("mlp-sgd", causes="clipping|optimizer", module="first")
def the_limit_of_clipping_is_doubled(patch: Patch) -> None:
    _clip(
        patch, lambda right, gradients, largest, *rest, **more: right(gradients, 2 * largest, *rest, **more)
    )


@bug("mlp-sgd", causes="clipping", module=None)
def a_parameter_is_left_out_of_the_norm(patch: Patch) -> None:
    def fewer(right: Any, gradients: Any, largest: float, *rest: Any, **more: Any) -> Any:
        norm = yield from right(gradients[:-1], largest, *rest, **more)
        if gradients[-1] is not None:
            gradients[-1].mul_((largest / (norm + 1e-6)).clamp(max=1.0))
        return norm

    _clip(patch, fewer)


@bug("mlp-sgd", causes="clipping|optimizer", module="first")
def each_parameter_is_clipped_by_itself(patch: Patch) -> None:
    def apart(right: Any, gradients: Any, largest: float, *rest: Any, **more: Any) -> Any:
        copies = [None if each is None else each.clone() for each in gradients]
        norm = yield from right(copies, largest, *rest, **more)
        for each in gradients:
            if each is not None:
                each.mul_((largest / 2 / (each.norm() + 1e-6)).clamp(max=1.0))
        return norm

    _clip(patch, apart)


@bug("mlp-sgd", causes="clipping|optimizer|scale", module="first")
def clipping_only_measures(patch: Patch) -> None:
    def measured(right: Any, gradients: Any, *rest: Any, **more: Any) -> Any:
        copies = [None if each is None else each.clone() for each in gradients]
        return (yield from right(copies, *rest, **more))

    _clip(patch, measured)


@bug("mlp-sgd", causes="clipping|optimizer", module="first")
def the_norm_is_of_absolute_values(patch: Patch) -> None:
    def other(right: Any, gradients: Any, largest: float, *rest: Any, **more: Any) -> Any:
        total = sum(float(each.abs().sum()) for each in gradients if each is not None)
        for each in gradients:
            if each is not None:
                each.mul_(min(1.0, largest / total))
        return (
            yield from right(
                [each if each is None else each.clone() for each in gradients], 1e9, *rest, **more
            )
        )

    _clip(patch, other)


def _schedule(patch: Patch, new: Any) -> None:
    """new: the schedulers that step in each update."""

    def scheduled(right: Any, self: Updater, *given: Any, **settings: Any) -> Any:
        turn = self._turn
        kept, turn.schedulers = turn.schedulers, new(turn.schedulers)
        try:
            return (yield from right(self, *given, **settings))
        finally:
            turn.schedulers = kept

    wrap(patch, Updater, "update", scheduled)


@bug(causes="optimizer", says="lr", module=None)
def schedulers_never_step(patch: Patch) -> None:
    _schedule(patch, lambda schedulers: [])


@bug(causes="optimizer", says="lr", module=None)
def schedulers_step_twice(patch: Patch) -> None:
    _schedule(patch, lambda schedulers: [*schedulers, *schedulers])


@bug(causes="optimizer", says="lr", module="first")
def schedulers_step_before_optimizers(patch: Patch) -> None:
    _schedule(patch, lambda schedulers: [])
    around_update(patch, lambda updater, step: [each.step() for each in updater.schedulers])  # type: ignore[arg-type,return-value]


@bug("mlp-muon", causes="optimizer", module=None)
def the_second_optimizer_does_not_step(patch: Patch) -> None:
    def one(right: Any, self: Updater, *given: Any, **settings: Any) -> Any:
        turn = self._turn
        kept, turn.optimizers = turn.optimizers, turn.optimizers[:1]
        try:
            return (yield from right(self, *given, **settings))
        finally:
            turn.optimizers = kept

    wrap(patch, Updater, "update", one)
