"""Bugs of pipelines: what is sent between stages, the order of microbatches, borrowed parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshloom.parameters.pipeline_ownership import PipelineOwnership
from meshloom.pipeline.runtime.stage import StageRun
from tests.planted.bugs import Patch, bug, wrap

STAGES = "pp=2,microbatches=3"


def _sent(patch: Patch, change: Any) -> None:
    """Changes values on their way to the next stage. change: of the stage, the microbatch and a value."""

    def changed(right: Any, self: StageRun, microbatch: int, values: Any) -> None:
        right(self, microbatch, {name: change(self, microbatch, each) for name, each in values.items()})

    wrap(patch, StageRun, "receive", changed)


def _returned(patch: Patch, change: Any) -> None:
    """Changes gradients on their way back."""

    def changed(right: Any, self: StageRun, microbatch: int, values: Any) -> None:
        right(self, microbatch, {name: change(self, microbatch, each) for name, each in values.items()})

    wrap(patch, StageRun, "receive_gradients", changed)


@bug(plan=STAGES, causes="rounding|stages", module=None)
def values_are_rounded_between_stages(patch: Patch) -> None:
    _sent(patch, lambda stage, microbatch, value: value.bfloat16().to(value.dtype))


@bug(plan=STAGES, causes="stages|unknown", module=None)
def values_are_a_hundred_thousandth_too_large(patch: Patch) -> None:
    _sent(patch, lambda stage, microbatch, value: value * 1.00005)


@bug(plan=STAGES, causes="stages|unknown", module=None)
def the_last_sample_is_lost_between_stages(patch: Patch) -> None:
    def lost(stage: StageRun, microbatch: int, value: Tensor) -> Tensor:
        value = value.clone()
        value[-1] = 0
        return value

    _sent(patch, lost)


@bug(plan=STAGES, causes="stages|unknown", module=None)
def samples_are_in_the_wrong_order_between_stages(patch: Patch) -> None:
    _sent(patch, lambda stage, microbatch, value: value.flip(0))


@bug(plan=STAGES, causes="stages|stale|unknown", module=None)
def values_are_those_of_the_step_before(patch: Patch) -> None:
    kept: dict[tuple[int, int], Tensor] = {}

    def late(stage: StageRun, microbatch: int, value: Tensor) -> Tensor:
        old = kept.get((id(stage), microbatch))
        kept[id(stage), microbatch] = value.clone()
        return value if old is None or old.shape != value.shape or not torch.is_grad_enabled() else old

    _sent(patch, late)


@bug(plan=STAGES, causes="stages|unknown|microbatches", module=None)
def a_stage_gets_the_first_microbatch_twice(patch: Patch) -> None:
    kept: dict[int, Tensor] = {}

    def repeated(stage: StageRun, microbatch: int, value: Tensor) -> Tensor:
        if microbatch == 0:
            kept[id(stage)] = value.clone()
        return kept[id(stage)][: len(value)] if microbatch == 1 else value

    _sent(patch, repeated)


@bug(plan=STAGES, causes="microbatches|missing_chunk", module=None)
def a_microbatchs_gradients_do_not_return(patch: Patch) -> None:
    _returned(patch, lambda stage, microbatch, value: torch.zeros_like(value) if microbatch == 1 else value)


@bug(plan=STAGES, causes="microbatches|unknown", module=None)
def a_microbatchs_gradients_return_twice(patch: Patch) -> None:
    _returned(patch, lambda stage, microbatch, value: value * 2 if microbatch == 2 else value)


@bug(plan=STAGES, causes="scale|unknown|microbatches", module=None)
def returned_gradients_are_divided_by_the_microbatches(patch: Patch) -> None:
    _returned(patch, lambda stage, microbatch, value: value / 3)


@bug(plan=STAGES, causes="stages", module=None)
def returned_gradients_are_rounded(patch: Patch) -> None:
    _returned(patch, lambda stage, microbatch, value: value.bfloat16().to(value.dtype))


@bug(plan=STAGES, causes="stages", module=None)
def returned_gradients_are_those_of_another_microbatch(patch: Patch) -> None:
    kept: dict[int, Tensor] = {}

    def exchanged(stage: StageRun, microbatch: int, value: Tensor) -> Tensor:
        old = kept.get(id(stage))
        kept[id(stage)] = value.clone()
        return value if old is None or old.shape != value.shape else old

    _returned(patch, exchanged)


@bug("gpt-adamw", STAGES, causes="tied|unknown", module="embed")
def the_borrowers_gradient_is_added_twice(patch: Patch) -> None:
    def doubled(right: Any, self: PipelineOwnership, parameters: Any) -> Any:
        for name, parameter in self._lent_here(parameters):
            if not self.owns(name) and parameter.grad is not None:
                parameter.grad.mul_(2)
        yield from right(self, parameters)

    wrap(patch, PipelineOwnership, "return_gradients", doubled)


@bug("gpt-adamw", STAGES, causes="stages|stale|replicas|unknown", module=None)
def lent_values_are_rounded(patch: Patch) -> None:
    def rounded(right: Any, self: PipelineOwnership, parameters: Any, kept: Any) -> Any:
        yield from right(self, parameters, kept)
        for name, parameter in self._lent_here(parameters):
            if not self.owns(name):
                with torch.no_grad():
                    parameter.copy_(parameter.bfloat16().to(parameter.dtype))

    wrap(patch, PipelineOwnership, "lend", rounded)


@bug(plan="pp=2,microbatches=3,schedule=zb-h1", causes="microbatches|missing_chunk|unknown", module=None)
def the_last_weight_gradient_is_left_out(patch: Patch) -> None:
    def without(right: Any, self: StageRun, microbatch: int) -> Any:
        if microbatch == 2:
            self._live.pop(microbatch)
            return {}
        return right(self, microbatch)

    wrap(patch, StageRun, "weight_gradients", without)


@bug(plan="pp=2,microbatches=3,schedule=zb-h1", causes="microbatches|scale", module=None)
def weight_gradients_are_computed_twice(patch: Patch) -> None:
    def twice(right: Any, self: StageRun, microbatch: int) -> Any:
        for compute in self._live[microbatch].weights[:1]:
            compute()
        return right(self, microbatch)

    wrap(patch, StageRun, "weight_gradients", twice)


@bug(plan=STAGES, causes="scale|microbatches|unknown", module=None)
def backward_begins_with_two_in_the_last_microbatch(patch: Patch) -> None:
    def louder(right: Any, self: StageRun, microbatch: int) -> Any:
        live = self._live[microbatch]
        if microbatch == 2 and live.root is not None:
            live.root = live.root * 2
        return right(self, microbatch)

    wrap(patch, StageRun, "_backward", louder)
