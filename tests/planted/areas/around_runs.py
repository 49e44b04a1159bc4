"""Bugs of evaluations, checkpoints and resuming."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import meshloom.optimizer.optimizer_state
import meshloom.replica.metrics
import meshloom.train.run_checkpoints
from meshloom.optimizer.averages import ParameterAverages
from meshloom.replica.chunk_scope import ChunkScope
from meshloom.replica.metrics import MetricSums
from meshloom.train.synchronous import SynchronousRun
from tests.planted.bugs import Patch, bug, wrap

EVALUATION, CHECKPOINT, RESUMED = (
    "DIFFERS: the evaluation",
    "DIFFERS: the checkpoint",
    "the first one after resuming",
)


def _means(patch: Patch, change: Any) -> None:
    def changed(right: Any, self: MetricSums) -> dict[str, float]:
        return {name: change(value) for name, value in right(self).items()}

    wrap(patch, MetricSums, "means", changed)


@bug(says=EVALUATION)
def metrics_are_divided_by_the_replicas(patch: Patch) -> None:
    _means(patch, lambda value: value / 2)


@bug(says=EVALUATION)
def metrics_are_off_by_a_ten_thousandth(patch: Patch) -> None:
    _means(patch, lambda value: value * 1.0001)


@bug(says=EVALUATION)
def metrics_are_of_the_first_replica(patch: Patch) -> None:
    def alone(right: Any, self: MetricSums, name: str, chunk: Any, returned: Any) -> None:
        if chunk.index < 2:
            right(self, name, chunk, returned)

    wrap(patch, MetricSums, "add", alone)


@bug(says=EVALUATION)
def metrics_are_of_rounded_data(patch: Patch) -> None:
    def rounded(right: Any, self: ChunkScope, chunk: Any) -> Any:
        found = right(self, chunk)
        return {**found, "x": found["x"].bfloat16().float()} if not torch.is_grad_enabled() else found

    wrap(patch, ChunkScope, "data", rounded)


@bug(says=EVALUATION)
def evaluations_read_a_sample_twice(patch: Patch) -> None:
    from meshloom.data import map_data

    def twice(right: Any, dataset: Any, *rest: Any) -> Any:
        class Again:
            def __len__(self) -> int:
                return len(dataset)

            def __getitem__(self, index: int) -> Any:
                return dataset[max(index, 1)]

        return right(Again(), *rest)

    patch.setattr("meshloom.data.job_data.map_chunks", lambda *given: twice(map_data.map_chunks, *given))


@bug("cnn-adamw", says="The evaluation changes")
def evaluations_move_statistics(patch: Patch) -> None:
    def moved(right: Any, replica: Any, chunks: Any, updates: int, *rest: Any) -> Any:
        values = yield from right(replica, chunks, updates, *rest)
        if updates:
            replica.model.norm.running_mean.add_(1e-4)
        return values

    wrap(patch, meshloom.replica.metrics, "_evaluate", moved)


@bug("averaged-adamw", says="The evaluation changes")
def averages_stay_in_place_of_parameters(patch: Patch) -> None:
    def staying(right: Any, self: ParameterAverages) -> Any:
        yield from right(self)
        return lambda: None

    wrap(patch, ParameterAverages, "show", staying)


@bug("cnn-adamw", says="The evaluation changes the mode")
def a_layer_stays_in_evaluation_mode(patch: Patch) -> None:
    def left(right: Any, replica: Any, chunks: Any, updates: int, *rest: Any) -> Any:
        values = yield from right(replica, chunks, updates, *rest)
        if updates:
            replica.model.norm2.eval()
        return values

    wrap(patch, meshloom.replica.metrics, "_evaluate", left)


def _pieces(patch: Patch, change: Any) -> None:
    """Changes the pieces of the optimizer's state that are saved."""

    def changed(right: Any, *given: Any, **settings: Any) -> Any:
        pieces, parts = right(*given, **settings)
        return [change(each) for each in pieces], parts

    wrap(patch, meshloom.optimizer.optimizer_state, "state_pieces", changed)


@bug(says=CHECKPOINT)
def second_moments_are_saved_as_first_ones(patch: Patch) -> None:
    kept: dict[str, Tensor] = {}

    def mixed(each: Any) -> Any:
        name, _, key = each.key.rpartition("/")
        if key == "exp_avg":
            kept[name] = each.tensor
        return replace(each, tensor=kept[name]) if key == "exp_avg_sq" else each

    _pieces(patch, mixed)


@bug(says=CHECKPOINT)
def step_counts_are_saved_one_too_high(patch: Patch) -> None:
    _pieces(patch, lambda each: replace(each, tensor=each.tensor + 1) if each.key.endswith("/step") else each)


@bug(says=CHECKPOINT)
def momentum_is_saved_off_by_a_ten_thousandth(patch: Patch) -> None:
    _pieces(
        patch,
        lambda each: replace(each, tensor=each.tensor * 1.0001) if each.key.endswith("/exp_avg") else each,
    )


@bug(says=CHECKPOINT)
def a_learning_rate_is_saved_wrong(patch: Patch) -> None:
    def wrong(right: Any, optimizer: Any) -> Any:
        kept = [(group, group["lr"]) for group in optimizer.param_groups]
        for group, rate in kept:
            group["lr"] = rate * 1.001
        found = right(optimizer)
        for group, rate in kept:
            group["lr"] = rate
        return found

    wrap(patch, meshloom.optimizer.optimizer_state, "settings", wrong)


def _weights(patch: Patch, change: Any) -> None:
    wrap(
        patch, meshloom.train.run_checkpoints, "held_weights",
        lambda right, replica: [change(each, replica) for each in right(replica)],
    )  # fmt: skip


@bug("cnn-adamw", says=CHECKPOINT)
def running_statistics_are_saved_as_they_began(patch: Patch) -> None:
    _weights(
        patch,
        lambda each, replica: (
            replace(each, tensor=torch.zeros_like(each.tensor)) if "running_mean" in each.key else each
        ),
    )


@bug(says=CHECKPOINT)
def two_weights_are_saved_for_one_another(patch: Patch) -> None:
    def mixed(each: Any, replica: Any) -> Any:
        if each.key.endswith("first.bias"):
            return replace(each, tensor=each.tensor.flip(0))
        return each

    _weights(patch, mixed)


@bug("averaged-adamw", says=RESUMED)
def averages_are_not_loaded(patch: Patch) -> None:
    patch.setattr(ParameterAverages, "load", lambda self, path, shape, read: None)


@bug(says=RESUMED)
def second_moments_are_loaded_as_zero(patch: Patch) -> None:
    def zero(right: Any, *given: Any, **settings: Any) -> Any:
        take = right(*given, **settings)

        def taken(key: str, shape: Any, read: Any) -> None:
            take(key, shape, (lambda *where: read(*where) * 0) if key.endswith("exp_avg_sq") else read)

        return taken

    wrap(patch, meshloom.optimizer.optimizer_state, "state_loader", zero)


@bug(says=RESUMED)
def step_counts_are_not_loaded(patch: Patch) -> None:
    def zero(right: Any, *given: Any, **settings: Any) -> Any:
        take = right(*given, **settings)

        def taken(key: str, shape: Any, read: Any) -> None:
            take(key, shape, (lambda *where: read(*where) * 0) if key.endswith("/step") else read)

        return taken

    wrap(patch, meshloom.optimizer.optimizer_state, "state_loader", zero)


@bug(says=RESUMED)
def settings_of_groups_are_not_loaded(patch: Patch) -> None:
    patch.setattr(meshloom.optimizer.optimizer_state, "load_settings", lambda optimizer, saved: None)


@bug("mlp-sgd", "dp=2,zero=1", says=RESUMED)
def owners_load_the_first_elements(patch: Patch) -> None:
    def first(right: Any, *given: Any, **settings: Any) -> Any:
        take = right(*given, **settings)

        def taken(key: str, shape: Any, read: Any) -> None:
            take(key, shape, lambda path, start, stop: read(path, 0, stop - start))

        return taken

    wrap(patch, meshloom.optimizer.optimizer_state, "state_loader", first)


@bug("cnn-adamw", says=RESUMED)
def statistics_are_not_loaded(patch: Patch) -> None:
    def forgotten(right: Any, self: SynchronousRun, directory: Any) -> None:
        right(self, directory)
        for replica in self.replicas.all:
            for name, buffer in replica.model.named_buffers():
                if "running_var" in name:
                    buffer.fill_(1.0)

    wrap(patch, SynchronousRun, "_resume", forgotten)


@bug(says=RESUMED)
def the_first_step_is_trained_again(patch: Patch) -> None:
    def again(right: Any, self: SynchronousRun, directory: Any) -> None:
        right(self, directory)
        self.next_step -= 1

    wrap(patch, SynchronousRun, "_resume", again)


@bug(says=RESUMED)
def schedulers_step_once_more_on_resuming(patch: Patch) -> None:
    def further(right: Any, self: SynchronousRun, directory: Any) -> None:
        right(self, directory)
        for replica in self.replicas.all:
            for scheduler in replica.updater.schedulers:
                scheduler.step()

    wrap(patch, SynchronousRun, "_resume", further)
