"""Bugs of evaluations that a mean over all data hides, and of what evaluations leave behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshloom.replica.metrics import MetricSums
from tests.planted.areas.evaluation import _around, _exchanged
from tests.planted.bugs import STAGES, Patch, bug, states_of, wrap

THREE = "dp=2,zero=3"


def _rounds(patch: Patch, names: tuple[str, ...], replicas: tuple[int, ...] = (0, 1)) -> None:
    """What these modules output in evaluations."""

    def change(replica: Any) -> Callable[[], None]:
        found = [each for name, each in replica.model.named_modules() if name in names]
        found = found if replica.context.place.dp in replicas else []
        handles = [
            each.register_forward_hook(lambda module, inputs, output: output.bfloat16().to(output.dtype))
            for each in found
        ]
        return lambda: [each.remove() for each in handles] and None

    _around(patch, change)


@bug("two-adamw", "dp=2", causes="forward", module="first")
@bug("convolutions-adamw", causes="forward", module="down")
@bug("long-adamw", "dp=2", causes="forward", module="blocks.1.up")
@bug("texts-adamw", THREE, causes="forward", module="blocks.1.up")
@bug("averaged_two-adamw", causes="forward", module="first")
def a_layer_is_rounded_in_the_second_replica(patch: Patch) -> None:
    _rounds(patch, ("first", "down", "blocks.1.up"), (1,))


@bug("two-adamw", causes="weights|mean_of_means", module=None)
@bug("convolutions-adamw", THREE, causes="weights|mean_of_means", module=None)
def chunks_of_metrics_count_alike(patch: Patch) -> None:
    """Means of means."""

    def add(right: Any, self: MetricSums, name: str, chunk: Any, returned: Any) -> None:
        right(self, name, chunk, (returned, 1) if not isinstance(returned, tuple) else returned)

    wrap(patch, MetricSums, "add", add)


@bug("two-adamw", "dp=2", causes="rounding|forward|stale", module="first")
@bug("long-adamw", "dp=2,zero=1", causes="rounding|forward|stale", module="embed")
@bug("skip-adamw", STAGES, causes="rounding|forward|stale", module="first")
def weights_are_rounded_in_evaluations(patch: Patch) -> None:
    def change(replica: Any) -> Callable[[], None]:
        undo = [
            _exchanged(each, each.detach().bfloat16().to(each.dtype))
            for _, each in replica.model.named_parameters()
            if not each.is_meta
        ]
        return lambda: [each() for each in undo] and None

    _around(patch, change)


@bug("two-adamw", causes="loss", module=None)
@bug("mlp-adamw", "dp=2,tp=2", causes="loss", module=None)
def errors_of_two_chunks_cancel(patch: Patch) -> None:
    def add(right: Any, self: MetricSums, name: str, chunk: Any, returned: Any) -> None:
        shift = {0: 1e-4, 1: -1e-4}.get(chunk.index, 0.0) / chunk.samples
        right(self, name, chunk, returned + shift)

    wrap(patch, MetricSums, "add", add)


@bug("convolutions-adamw", "dp=2", causes="rounding|forward|loss|autocast", module="conv")
@bug("two-adamw", THREE, causes="rounding|forward|loss|autocast", module="first")
def metrics_are_computed_under_autocast(patch: Patch) -> None:
    def change(replica: Any) -> Callable[[], None]:
        right = replica.model.forward

        def forward(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return right(x)

        replica.model.forward = forward
        return lambda: delattr(replica.model, "forward")

    _around(patch, change)


@bug("two-adamw", says="exp_avg", causes="optimizer", module=None)
def evaluations_forget_momentum(patch: Patch) -> None:
    def change(replica: Any) -> Callable[[], None]:
        def forget() -> None:
            for state in states_of(replica.updater):
                state["exp_avg"].zero_()

        return forget

    _around(patch, change)


@bug("two-adamw", says="evaluation", module=None)
def evaluations_freeze_a_weight(patch: Patch) -> None:
    def change(replica: Any) -> Callable[[], None]:
        def freeze() -> None:
            replica.model.head.weight.requires_grad_(False)

        return freeze

    _around(patch, change)


@bug("convolutions-adamw", "dp=2", causes="forward", module="norm")
def a_norm_has_another_epsilon_in_evaluations(patch: Patch) -> None:
    def change(replica: Any) -> Callable[[], None]:
        norm = replica.model.norm
        kept, norm.eps = norm.eps, 1e-4
        return lambda: setattr(norm, "eps", kept)

    _around(patch, change)


@bug("long-adamw", "dp=2", causes="forward", module="position")
def positions_begin_at_one_in_evaluations(patch: Patch) -> None:
    def change(replica: Any) -> Callable[[], None]:
        position = replica.model.position
        right = position.forward
        position.forward = lambda index: right((index + 1).clamp(max=192))
        return lambda: delattr(position, "forward")

    _around(patch, change)


@bug("two-adamw", "dp=2", causes="data", module=None)
def the_last_sample_of_a_chunk_is_evaluated_twice(patch: Patch) -> None:
    from meshloom.replica.chunk_scope import ChunkScope

    def repeated(right: Any, self: ChunkScope, chunk: Any) -> Any:
        found = right(self, chunk)
        if torch.is_grad_enabled() or chunk.samples < 2:
            return found
        order = torch.tensor([*range(chunk.samples - 1), chunk.samples - 2])
        return {name: each[order] for name, each in found.items()}

    wrap(patch, ChunkScope, "data", repeated)


@bug("skip-adamw", "pp=2,microbatches=2", causes="forward", module="second")
@bug("skip-adamw", "tp=2", causes="forward", module="second")
@bug("mlp-adamw", "dp=2,pp=2", causes="forward", module="second")
def one_bias_is_left_out_of_evaluations(patch: Patch) -> None:
    def change(replica: Any) -> Callable[[], None]:
        undo = [
            _exchanged(each, torch.zeros_like(each))
            for name, each in replica.model.named_parameters()
            if name == "second.bias" and not each.is_meta
        ]
        return lambda: [each() for each in undo] and None

    _around(patch, change)
