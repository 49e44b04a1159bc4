"""Bugs of evaluations alone: training is right."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import meshloom.comm.simulated as simulated
import meshloom.replica.metrics
from meshloom.comm.simulated import SimulatedGroup
from meshloom.core.moments.modes import Modes
from meshloom.optimizer.averages import ParameterAverages
from meshloom.pipeline.stages.program_store import ProgramStore
from meshloom.replica.metrics import MetricSums
from meshloom.replica.replica import Replica
from tests.planted.bugs import PARTS, STAGES, Patch, bug, wrap

THREE = "dp=2,zero=3"
BOTH = "dp=2,pp=2,microbatches=2"


def _modes(patch: Patch, change: Callable[[nn.Module], None]) -> None:
    """Changes the model once it is in evaluation mode."""

    @contextmanager
    def changed(right: Any, self: Modes) -> Iterator[None]:
        with right(self):
            change(self._model)
            yield

    wrap(patch, Modes, "evaluation", changed)


def _around(patch: Patch, change: Callable[[Any], Callable[[], None]]) -> None:
    """Calls `change` with a replica before its metrics are computed, and what it returns afterwards."""

    def changed(right: Any, replica: Any, chunks: Any, updates: int, *rest: Any) -> Any:
        undo = change(replica) if updates else lambda: None
        values = yield from right(replica, chunks, updates, *rest)
        undo()
        return values

    wrap(patch, meshloom.replica.metrics, "_evaluate", changed)


def _exchanged(tensor: Tensor, values: Tensor) -> Callable[[], None]:
    """Gives a tensor other values, and back."""
    kept = tensor.detach().clone()
    with torch.no_grad():
        tensor.copy_(values)

    def undo() -> None:
        with torch.no_grad():
            tensor.copy_(kept)

    return undo


@bug("cnn-adamw", causes="forward", module="norm2")
@bug("cnn-sgd", "dp=2,zero=1", causes="forward", module="norm2")
@bug("cnn-adamw", "dp=3,microbatches=2", causes="forward", module="norm2")
def a_norm_stays_in_training_mode(patch: Patch) -> None:
    _modes(patch, lambda model: model.get_submodule("norm2").train() and None)


@bug("cnn-adamw", causes="forward", module="dropout")
@bug("gpt-adamw", causes="forward", module="dropout")
@bug("gpt-sgd", "dp=2,zero=3", causes="forward", module="dropout")
def dropout_is_active(patch: Patch) -> None:
    def drop(model: nn.Module) -> None:
        for each in model.modules():
            if isinstance(each, nn.Dropout):
                each.train()

    _modes(patch, drop)


@bug("gpt-adamw", causes="forward", module="blocks.1.dropout")
@bug("gpt-adamw", "dp=3", causes="forward", module="blocks.1.dropout")
def dropout_of_one_block_is_active(patch: Patch) -> None:
    _modes(patch, lambda model: model.get_submodule("blocks.1.dropout").train() and None)


@bug("cnn-adamw", causes="forward", module="norm")
@bug("cnn-sgd", "dp=2,zero=2", causes="forward", module="norm")
def statistics_are_those_of_the_batch(patch: Patch) -> None:
    """Without writing them."""
    right = nn.BatchNorm2d.forward

    def forward(self: nn.BatchNorm2d, x: Tensor) -> Tensor:
        if self.training or torch.is_grad_enabled():
            return right(self, x)
        return torch.nn.functional.batch_norm(x, None, None, self.weight, self.bias, True)

    def change(replica: Any) -> Callable[[], None]:
        norm = replica.model.norm
        norm.forward = lambda x: forward(norm, x)
        return lambda: delattr(norm, "forward")

    _around(patch, change)


@bug("gpt-adamw", STAGES, causes="forward", module="dropout")
@bug("gpt-adamw", "tp=3", causes="forward", module="dropout")
@bug("cnn-adamw", STAGES, causes="forward", module="norm")
@bug("gpt-adamw", BOTH, causes="forward", module="dropout")
def metrics_have_programs_of_training(patch: Patch) -> None:
    def ready(right: Any, self: ProgramStore, batch: Any, *, loss: Any = None, training: bool = True) -> Any:
        return right(self, batch, loss=loss, training=True)

    for name in ("ready", "key"):
        wrap(patch, ProgramStore, name, ready)


@bug("averaged_mlp-adamw", causes="averages", module="second")
@bug("averaged_cnn-adamw", causes="averages", module="hidden")
@bug("averaged_gpt-adamw", causes="averages", module="blocks.0.qkv")
@bug("averaged_mlp-sgd", "dp=2,zero=3", causes="averages", module="second")
@bug("averaged_mlp-adamw", STAGES, causes="averages|forward", module="second")
def one_layer_is_not_averaged(patch: Patch) -> None:
    names = {"second.weight", "hidden.weight", "blocks.0.qkv.weight"}
    here: list[bool] = []  # in an evaluation

    def evaluate(right: Any, *given: Any) -> Any:
        here.append(True)
        values = yield from right(*given)
        here.clear()
        return values

    def show(right: Any, self: ParameterAverages) -> Any:
        if not here:
            return (yield from right(self))
        kept = {each.name: each for each in self.held if each.name in names}
        slices = {each.name: each.data().clone() for each in self._exchange.owned if each.name in names}
        averages = {name: each.tensor.data.clone() for name, each in kept.items()}
        for name, each in kept.items():
            each.tensor.data.copy_(slices[name])
        put_back = yield from right(self)
        for name, each in kept.items():
            each.tensor.data.copy_(averages[name])
        return put_back

    wrap(patch, meshloom.replica.metrics, "evaluate", evaluate)
    patch.setattr("meshloom.train.evaluation.evaluate", meshloom.replica.metrics.evaluate)
    wrap(patch, ParameterAverages, "show", show)


@bug("mlp-sgd", THREE, causes="stale", module="second")
@bug("cnn-sgd", THREE, causes="stale", module="hidden")
@bug("gpt-sgd", "dp=2,zero=3,microbatches=2", causes="stale", module="blocks.0.qkv")
@bug("mlp-sgd", "pp=2,dp=2,zero=3", causes="forward|stale", module="second")
def a_slice_of_a_weight_is_another(patch: Patch) -> None:
    """That of one owner, where it is gathered."""
    owners = {"second.weight": 1, "hidden.weight": 1, "blocks.0.qkv.weight": 0}

    def change(replica: Any) -> Callable[[], None]:
        undo = [
            _exchanged(each.data(), each.data() * 0.97)
            for each in replica.exchange.each_slice()
            if owners.get(each.name) == replica.context.place.dp
        ]
        return lambda: [each() for each in undo] and None

    _around(patch, change)


def _weights_of_the_step_before(patch: Patch, replicas: Collection[int]) -> None:
    """One weight of these replicas, in evaluations."""
    names = {"second.weight", "hidden.weight", "blocks.0.qkv.weight"}
    before: dict[tuple[int, str], Tensor] = {}

    def update(right: Any, self: Replica, found: Any) -> Any:
        for name, each in self.model.named_parameters():
            if name in names and not each.is_meta:
                before[id(self), name] = each.detach().clone()
        return (yield from right(self, found))

    def change(replica: Any) -> Callable[[], None]:
        undo = [
            _exchanged(each, before[id(replica), name])
            for name, each in replica.model.named_parameters()
            if replica.context.place.dp in replicas and (id(replica), name) in before
        ]
        return lambda: [each() for each in undo] and None

    wrap(patch, Replica, "update", update)
    _around(patch, change)


@bug("gpt-adamw", causes="stale", module="blocks.0.qkv")
@bug("cnn-adamw", "dp=2,zero=1", causes="stale", module="hidden")
@bug("mlp-adamw", causes="stale", module="second")
def the_second_replica_sees_an_older_weight(patch: Patch) -> None:
    _weights_of_the_step_before(patch, [1])


@bug("gpt-adamw", causes="stale", module="blocks.0.qkv")
@bug("mlp-adamw", STAGES, causes="stale", module="second")
@bug("mlp-adamw", causes="stale", module="second")
def all_see_an_older_weight(patch: Patch) -> None:
    _weights_of_the_step_before(patch, [0, 1])


@bug("cnn-adamw", causes="stale", module="norm2")
@bug("cnn-sgd", "dp=2,zero=3", causes="stale", module="norm2")
@bug("cnn-adamw", STAGES, causes="forward", module="norm2")
def running_variances_are_those_of_the_start(patch: Patch) -> None:
    def change(replica: Any) -> Callable[[], None]:
        buffers = {name: each for name, each in replica.model.named_buffers() if not each.is_meta}
        undo = [
            _exchanged(each, torch.ones_like(each)) for name, each in buffers.items() if name == "norm2.running_var"
        ]  # fmt: skip
        return lambda: [each() for each in undo] and None

    _around(patch, change)


@bug("mlp-adamw", causes="weights", module=None)
@bug("cnn-adamw", "dp=2,zero=3", causes="weights", module=None)
@bug("mlp-adamw", "dp=2,tp=2", causes="weights", module=None)
def the_second_replica_counts_a_sample_too_many(patch: Patch) -> None:
    def add(right: Any, self: MetricSums, name: str, chunk: Any, returned: Any) -> None:
        right(self, name, replace(chunk, samples=chunk.samples + (chunk.index > 0)), returned)

    wrap(patch, MetricSums, "add", add)


@bug("gpt-adamw", causes="weights", module=None)
@bug("gpt-adamw", STAGES, causes="weights", module=None)
def padding_counts(patch: Patch) -> None:
    def add(right: Any, self: MetricSums, name: str, chunk: Any, returned: Any) -> None:
        total, count = returned
        right(self, name, chunk, (total, count + 2))

    wrap(patch, MetricSums, "add", add)


@bug("mlp-adamw", causes="loss", module=None)
@bug("gpt-adamw", "dp=2,zero=3", causes="loss", module=None)
def what_a_metric_returns_is_rounded(patch: Patch) -> None:
    def add(right: Any, self: MetricSums, name: str, chunk: Any, returned: Any) -> None:
        if isinstance(returned, tuple):
            returned = returned[0].bfloat16().float(), returned[1]
        else:
            returned = returned.bfloat16().float()
        right(self, name, chunk, returned)

    wrap(patch, MetricSums, "add", add)


@bug("mlp-adamw", causes="forward", module="second")
@bug("gpt-adamw", "dp=2,zero=3", causes="forward", module="blocks.0.up")
@bug("unused_twice-adamw", causes="forward", module="shared")
def one_layer_is_rounded(patch: Patch) -> None:
    names = ("second", "blocks.0.up", "shared")

    def change(replica: Any) -> Callable[[], None]:
        found = [each for name, each in replica.model.named_modules() if name in names]
        handles = [
            each.register_forward_hook(lambda module, inputs, output: output.bfloat16().to(output.dtype))
            for each in found
        ]
        return lambda: [each.remove() for each in handles] and None

    _around(patch, change)


@bug("mlp-adamw", STAGES, causes="forward", module="head")
@bug("gpt-adamw", f"{STAGES},cuts=blocks.1", causes="forward", module="blocks.1.norm")
def messages_are_rounded_in_evaluations(patch: Patch) -> None:
    def rounded(right: Any, self: SimulatedGroup, tensor: Tensor, destination: int) -> Any:
        low = not torch.is_grad_enabled() and tensor.is_floating_point() and tensor.numel() > 8
        return right(self, tensor.bfloat16().to(tensor.dtype) if low else tensor, destination)

    wrap(patch, SimulatedGroup, "send", rounded)


@bug("mlp-adamw", PARTS, causes="forward", module="first")
@bug("gpt-adamw", "tp=3,tp_placements=embed:vocabulary", causes="forward", module="dropout")
def sums_over_parts_lose_a_rank_in_evaluations(patch: Patch) -> None:
    here: list[bool] = []  # in evaluations

    def change(replica: Any) -> Callable[[], None]:
        here.append(True)
        return here.clear

    def lost(right: Any, tensors: Any, op: str) -> Tensor:
        is_sum = here and tensors[0].is_floating_point() and tensors[0].numel() > 8
        return right([*tensors[:-1], torch.zeros_like(tensors[-1])] if is_sum else tensors, op)

    _around(patch, change)
    wrap(patch, simulated, "_reduce", lost)


@bug("mlp-adamw", causes="data", module=None)
@bug("cnn-adamw", "dp=2,zero=3", causes="data", module=None)
def the_last_batch_is_not_evaluated(patch: Patch) -> None:
    from meshloom.data import map_data

    right = map_data.map_chunks
    patch.setattr(
        "meshloom.data.job_data.map_chunks",
        lambda dataset, job, plan, replica, shares, batches: right(
            dataset, job, plan, replica, shares, batches or 2
        ),
    )


@bug("mlp-adamw", "dp=2,tp=2", says="on rank 1, and", module=None)
@bug("gpt-adamw", "tp=3", says="on rank 1, and", module=None)
def one_rank_of_a_team_has_another_metric(patch: Patch) -> None:
    def change(right: Any, replica: Any, *rest: Any) -> Any:
        values = yield from right(replica, *rest)
        wrong = replica.context.place.tp == 1
        return {name: value * (1.001 if wrong else 1.0) for name, value in values.items()}

    wrap(patch, meshloom.replica.metrics, "_evaluate", change)


@bug("cnn-adamw", causes="between_steps", module=None)
@bug("mlp-adamw", "dp=2,zero=3", causes="between_steps", module=None)
def the_first_evaluation_after_a_step_is_of_other_weights(patch: Patch) -> None:
    evaluated: set[int] = set()

    def update(right: Any, self: Replica, found: Any) -> Any:
        evaluated.discard(id(self))
        return (yield from right(self, found))

    def change(replica: Any) -> Callable[[], None]:
        first = id(replica) not in evaluated
        evaluated.add(id(replica))
        owned = [each.data() for each in replica.exchange.owned] if replica.exchange.only_slices else []
        tensors = owned or [each for _, each in replica.model.named_parameters()]
        undo = [_exchanged(each, each.detach() * 1.01) for each in tensors if first]
        return lambda: [each() for each in undo] and None

    wrap(patch, Replica, "update", update)
    _around(patch, change)
