"""Bugs of the loop of a run: seeds of steps, reported losses, modes, averages of parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import meshloom.replica.chunk_scope
from meshloom.core.random import chunk_seed
from meshloom.optimizer.averages import ParameterAverages
from meshloom.optimizer.updater import Updater
from meshloom.replica.loss_sums import LossSums
from meshloom.replica.replica import Replica
from tests.planted.bugs import Patch, bug, on_models, wrap


@bug(causes="loss", module=None)
def the_reported_loss_is_of_the_wrong_weight(patch: Patch) -> None:
    def gradients(right: Any, self: Replica, step: int, chunks: Any) -> Any:
        found = yield from right(self, step, chunks)
        return replace(found, loss=found.loss * 1.0005)

    wrap(patch, Replica, "gradients", gradients)


@bug(causes="loss", module=None)
def the_reported_loss_is_that_of_the_step_before(patch: Patch) -> None:
    before: dict[int, float] = {}

    def late(right: Any, self: Replica, step: int, chunks: Any) -> Any:
        found = yield from right(self, step, chunks)
        old = before.get(id(self), found.loss)
        before[id(self)] = found.loss
        return replace(found, loss=old)

    wrap(patch, Replica, "gradients", late)


@bug("cnn-adamw", causes="same_draws", module="dropout")
def masks_follow_the_replica_and_not_the_chunk(patch: Patch) -> None:
    patch.setattr(
        meshloom.replica.chunk_scope,
        "chunk_seed",
        lambda seed, step, chunk: chunk_seed(seed, step, chunk // 2),
    )


@bug("cnn-adamw", causes="same_draws", module="dropout")
def masks_are_those_of_the_next_step(patch: Patch) -> None:
    patch.setattr(
        meshloom.replica.chunk_scope,
        "chunk_seed",
        lambda seed, step, chunk: chunk_seed(seed, step + 1, chunk),
    )


@bug("gpt-adamw", "pp=2,microbatches=2", causes="same_draws|stages|unknown", module=None)
def masks_of_programs_are_those_of_the_next_step(patch: Patch) -> None:
    patch.setattr(
        meshloom.replica.chunk_scope,
        "chunk_seed",
        lambda seed, step, chunk: chunk_seed(seed, step + 1, chunk),
    )


@bug("cnn-adamw", causes="same_draws", module="dropout")
def masks_are_not_seeded(patch: Patch) -> None:
    patch.setattr(meshloom.replica.chunk_scope, "seed_torch", lambda seed: None)


@bug("cnn-adamw", causes="same_draws", module="dropout")
def dropout_is_off(patch: Patch) -> None:
    def off(model: Any, replica: int) -> None:
        model.dropout.forward = lambda x: x

    on_models(patch, off)


@bug("cnn-adamw", causes="forward", module="dropout")
def dropout_has_another_rate(patch: Patch) -> None:
    def other(model: Any, replica: int) -> None:
        model.dropout.p = 0.24

    on_models(patch, other)


@bug(causes="forward", module="second")
def a_layer_is_applied_without_its_bias(patch: Patch) -> None:
    def without(model: Any, replica: int) -> None:
        model.second.forward = lambda x: (
            torch.nn.functional.linear(x, model.second.weight) + 0 * model.second.bias
        )

    on_models(patch, without)


@bug(causes="optimizer", module="first")
def every_second_update_is_left_out(patch: Patch) -> None:
    counts: dict[int, int] = {}

    def some(right: Any, self: Updater, *given: Any, **settings: Any) -> Any:
        counts[id(self)] = counts.get(id(self), 0) + 1
        return (yield from right(self, *given, **{**settings, "skip": counts[id(self)] % 2 == 0}))

    wrap(patch, Updater, "update", some)


@bug(causes="weights|scale|unknown", module=None)
def a_chunk_counts_one_sample_too_many(patch: Patch) -> None:
    def more(right: Any, self: LossSums, returned: Any, chunk: Any) -> Any:
        return right(self, returned, replace(chunk, samples=chunk.samples + 1) if chunk.index == 1 else chunk)

    wrap(patch, LossSums, "add", more)


@bug("averaged-adamw", says="average", causes="averages|optimizer", module="first")
def averages_move_too_fast(patch: Patch) -> None:
    def faster(right: Any, self: ParameterAverages) -> None:
        right(self)
        if self.started:
            for held, owned in zip(self.held, self._exchange.owned, strict=True):
                held.tensor.data.lerp_(owned.data(), 0.05)

    wrap(patch, ParameterAverages, "update", faster)


@bug("averaged-adamw", says="average", causes="averages|optimizer", module="first")
def averages_begin_at_zero(patch: Patch) -> None:
    def zero(right: Any, self: ParameterAverages) -> None:
        begun = self.started
        right(self)
        if not begun:
            for held in self.held:
                held.tensor.data.mul_(0.1)

    wrap(patch, ParameterAverages, "update", zero)


@bug("averaged-adamw", causes="averages", says="DIFFERS: the evaluation", module=None)
def evaluations_do_not_see_averages(patch: Patch) -> None:
    def nothing(right: Any, self: ParameterAverages) -> Any:
        return lambda: None
        yield

    patch.setattr(ParameterAverages, "show", lambda self: nothing(None, self))
