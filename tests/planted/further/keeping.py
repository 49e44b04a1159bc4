"""Bugs of what lasts between steps: buffers, state in attributes, checkpoints."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import meshloom.train.run_checkpoints
from meshloom.core.moments.modes import Modes
from meshloom.optimizer.averages import ParameterAverages
from meshloom.replica.attributes.carried_tensors import CarriedTensors
from meshloom.replica.attributes.plain_numbers import PlainNumbers
from meshloom.replica.buffers.chunk_writes import ChunkWrites
from meshloom.replica.chunk_scope import ChunkScope
from tests.planted.bugs import Patch, bug, groups_of, states_of, wrap

CHECKPOINT, RESUMED = "DIFFERS: the checkpoint", "the first one after resuming"


@bug("cnn-adamw", "dp=2", says="hold different", causes="replicas|batch_statistics", module="norm")
def statistics_of_the_second_replica_drift(patch: Patch) -> None:
    def drifted(right: Any, self: ChunkScope) -> Any:
        yield from right(self)
        if self._context.place.dp == 1:
            self._model.norm.running_mean.add_(1e-3)

    wrap(patch, ChunkScope, "finish", drifted)


@bug("histogram-adamw", causes="batch_statistics", says="counts", module="the whole model")
def counts_of_the_last_chunk_are_left_out(patch: Patch) -> None:
    def without(right: Any, self: ChunkWrites, parts: Tensor) -> Any:
        parts = parts.clone()
        parts[-1] = 0
        return right(self, parts)

    wrap(patch, ChunkWrites, "apply", without)


@bug(
    "histogram-adamw",
    "pp=2,microbatches=3",
    causes="batch_statistics",
    says="largest",
    module="the whole model",
)
def a_moving_average_moves_a_tenth_too_far(patch: Patch) -> None:
    def moved(right: Any, self: ChunkScope) -> Any:
        before = {name: each.clone() for name, each in self._model.named_buffers() if not each.is_meta}
        yield from right(self)
        if "largest" in before:
            self._model.largest.mul_(1.001)

    wrap(patch, ChunkScope, "finish", moved)


@bug("frozennorm-adamw", causes="forward|batch_statistics", module="norm")
@bug("frozennorm-adamw", "dp=2,zero=3", causes="forward|batch_statistics", module="norm")
def frozen_statistics_are_trained(patch: Patch) -> None:
    def everything(right: Any, self: Modes) -> None:
        self._model.train()

    wrap(patch, Modes, "_restore", everything)


@bug("recurrent-adamw", causes="stale|forward|data|unknown|state", module="cell")
def all_chunks_go_on_with_the_state_of_the_first(patch: Patch) -> None:
    wrap(patch, CarriedTensors, "put_back", lambda right, self, index: right(self, index // 2 * 2))


@bug("recurrent-adamw", "dp=2", causes="stale|forward|data|unknown|state", module="cell")
@bug("recurrent-adamw", "pp=2,microbatches=2", causes="stale|forward|data|unknown|state|stages", module=None)
def states_are_forgotten_after_each_step(patch: Patch) -> None:
    wrap(patch, CarriedTensors, "put_back", lambda right, self, index: self._put({}))


@bug("recurrent-adamw", says=CHECKPOINT, causes="optimizer", module=None)
def states_are_saved_for_one_another(patch: Patch) -> None:
    def turned(right: Any, self: CarriedTensors) -> Any:
        found = list(right(self))
        for (name, index, _), (_, _, value) in zip(found, [*found[1:], found[0]], strict=True):
            yield name, index, value

    wrap(patch, CarriedTensors, "left", turned)


@bug("counting-adamw", causes="saved|forward|stale|unknown|state", module=None)
def chunks_are_counted_in_place_of_steps(patch: Patch) -> None:
    def counted(right: Any, self: PlainNumbers) -> Any:
        yield from right(self)
        for module, name in self._places:
            setattr(module, name, getattr(module, name) + 1)

    wrap(patch, PlainNumbers, "finish", counted)


@bug("counting-adamw", says=RESUMED, module=None)
@bug("counting-adamw", "pp=2,microbatches=2", says=RESUMED, module=None)
def numbers_begin_again_where_a_run_is_resumed(patch: Patch) -> None:
    patch.setattr(PlainNumbers, "resume", lambda self, values: None)


@bug("two-adamw", says=CHECKPOINT, module=None)
@bug("long-adamw", "dp=2,zero=1", says=CHECKPOINT, module=None)
def weights_are_saved_rounded(patch: Patch) -> None:
    def rounded(right: Any, replica: Any) -> Any:
        import dataclasses

        found = right(replica)
        return [
            dataclasses.replace(each, tensor=each.tensor.bfloat16().to(each.tensor.dtype))
            if each.tensor.is_floating_point()
            else each
            for each in found
        ]

    wrap(patch, meshloom.train.run_checkpoints, "held_weights", rounded)


def _after_resuming(patch: Patch, change: Any) -> None:
    """Changes a replica that has been resumed."""

    def resumed(right: Any, self: Any, *given: Any, **settings: Any) -> Any:
        found = right(self, *given, **settings)
        for replica in self._replicas.all:
            change(replica)
        return found

    wrap(patch, meshloom.train.run_checkpoints.RunCheckpoints, "resume", resumed)


@bug("two-adamw", says=RESUMED, module=None)
def decays_of_groups_are_exchanged_on_resuming(patch: Patch) -> None:
    def exchanged(replica: Any) -> None:
        groups = list(groups_of(replica.updater))
        decays = [group["weight_decay"] for group in groups]
        for group, decay in zip(groups, reversed(decays), strict=True):
            group["weight_decay"] = decay

    _after_resuming(patch, exchanged)


@bug("convolutions-adamw", "dp=2,zero=1", says=RESUMED, module=None)
@bug("texts-adamw", "tp=2", says=RESUMED, module=None)
def momentum_is_loaded_with_the_wrong_sign(patch: Patch) -> None:
    def negated(replica: Any) -> None:
        for state in states_of(replica.updater):
            state["exp_avg"].neg_()

    _after_resuming(patch, negated)


@bug("averaged_two-adamw", says="average", module=None)
def averages_are_loaded_as_the_parameters(patch: Patch) -> None:
    def replaced(replica: Any) -> None:
        averages: ParameterAverages = replica.updater.state.averages
        for each, owned in zip(averages.held, replica.exchange.owned, strict=True):
            each.tensor.data.copy_(owned.data())

    _after_resuming(patch, replaced)


@bug("two-adamw", says=RESUMED, module=None)
def a_resumed_run_draws_another_order(patch: Patch) -> None:
    from meshloom.data.map_data import Batches

    resumed: list[bool] = []

    def turned(right: Any, self: Batches, step: int) -> Any:
        epoch, indices = right(self, step)
        return epoch, indices[::-1] if resumed else indices

    _after_resuming(patch, lambda replica: resumed.append(True))
    wrap(patch, Batches, "of", turned)
