"""Bugs of pipelines: microbatches, weight gradients that come later, borrowed parameters, recomputation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import meshloom.program.run.segment_runner as segment_runner
from meshloom.parameters.pipeline_ownership import PipelineOwnership
from meshloom.pipeline.runtime.stage import DeferredWeightGradients, StageRun
from meshloom.replica.replica import Replica
from tests.planted.bugs import STAGES, Patch, bug, wrap

LATER = "pp=2,microbatches=3,schedule=zb-h1"


@bug("skip-adamw", STAGES, causes="stages|data|loss|unknown|microbatches", module=None)
@bug("convolutions-adamw", "pp=2,microbatches=4", causes="stages|data|loss|unknown|microbatches", module=None)
def the_last_stage_has_the_labels_of_another_microbatch(patch: Patch) -> None:
    def other(right: Any, self: StageRun, microbatch: int) -> Any:
        if not self._finish or not torch.is_grad_enabled():
            return right(self, microbatch)
        batch, count = self._batch, len(self._stages)

        def rotated(number: int) -> Any:
            theirs = batch((number + 1) % count)
            alike = all(
                a.shape == b.shape for a, b in zip(_tensors(theirs), _tensors(batch(number)), strict=True)
            )
            return theirs if alike else batch(number)

        self._batch = rotated
        try:
            return right(self, microbatch)
        finally:
            self._batch = batch

    wrap(patch, StageRun, "rerun", other)


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(vars(tree) if hasattr(tree, "__dict__") else tree) if isinstance(each, Tensor)]  # fmt: skip


@bug("cnn-adamw", STAGES, causes="batch_statistics", module="norm")
def the_last_microbatch_writes_no_statistics(patch: Patch) -> None:
    def kept(right: Any, self: StageRun, microbatch: int) -> Any:
        names = self._stages[microbatch].changing
        before = {name: self._buffers[name].clone() for name in names}
        values = right(self, microbatch)
        if microbatch == 2:
            for name, value in before.items():
                self._buffers[name].copy_(value)
        return values

    wrap(patch, StageRun, "rerun", kept)


@bug("skip-adamw", LATER, causes="microbatches|stages|unknown", module=None)
@bug("texts-adamw", LATER, causes="microbatches|stages|unknown", module=None)
def later_weight_gradients_use_inputs_of_the_microbatch_before(patch: Patch) -> None:
    kept: dict[tuple[int, int], Tensor] = {}

    def older(right: Any, self: Any, weight: Any, bias: Any, rows: Tensor, inputs: Tensor) -> None:
        key = id(self), id(weight)
        before = kept.get(key)
        kept[key] = inputs
        usable = before is not None and before.shape == inputs.shape and self.collecting
        right(self, weight, bias, rows, before if usable else inputs)

    wrap(patch, DeferredWeightGradients, "add", older)


@bug("texts-adamw", STAGES, causes="tied|missing_chunk|unknown", module="embed")
def the_borrowers_gradient_is_lost(patch: Patch) -> None:
    def lost(right: Any, self: PipelineOwnership, parameters: Any) -> Any:
        for name, parameter in self._lent_here(parameters):
            if not self.owns(name):
                parameter.grad = None
        yield from right(self, parameters)

    wrap(patch, PipelineOwnership, "return_gradients", lost)


@bug("texts-adamw", STAGES, causes="stale|replicas|stages", module=None)
def borrowers_keep_the_first_values(patch: Patch) -> None:
    first: dict[tuple[int, str], Tensor] = {}

    def kept(right: Any, self: PipelineOwnership, parameters: Any, held: Any) -> Any:
        yield from right(self, parameters, held)
        for name, parameter in self._lent_here(parameters):
            if not self.owns(name):
                with torch.no_grad():
                    parameter.copy_(first.setdefault((id(self), name), parameter.detach().clone()))

    wrap(patch, PipelineOwnership, "lend", kept)


@bug("skip-adamw", "pp=3,microbatches=2", causes="stages|unknown", module=None)
def a_gradient_of_one_later_stage_replaces_that_of_another(patch: Patch) -> None:
    def replaced(right: Any, self: StageRun, microbatch: int, gradients: Any) -> None:
        self._live[microbatch].gradients.update(gradients)

    wrap(patch, StageRun, "receive_gradients", replaced)


@bug("texts-adamw", "pp=2,microbatches=2,recompute=full", causes="recompute|same_draws", module=None)
@bug("long-adamw", "dp=2,recompute=full", causes="recompute|same_draws", module=None)
def what_is_recomputed_has_masks_of_its_own(patch: Patch) -> None:
    """In backward."""

    def other(right: Any, seed: int) -> None:
        right(seed + torch._C._current_graph_task_id() + 1)

    wrap(patch, segment_runner, "seed_torch", other)


@bug("skip-adamw", STAGES, causes="optimizer|scale|stages|unknown", module=None)
def the_second_stage_steps_with_half_the_gradients(patch: Patch) -> None:
    def halved(right: Any, self: Replica, found: Any) -> Any:
        if self.context.place.pp == 1:
            for each in found.of_owned:
                each.mul_(0.5) if each is not None else None
        return (yield from right(self, found))

    wrap(patch, Replica, "update", halved)


@bug("skip-adamw", "pp=2,microbatches=4,schedule=interleaved", causes="stages|unknown", module=None)
def values_of_the_second_stage_lose_their_sign_once(patch: Patch) -> None:
    def turned(right: Any, self: StageRun, microbatch: int) -> Any:
        found = right(self, microbatch)
        numbers = self._stages[microbatch].number
        return {name: -value if numbers == 1 and microbatch == 3 else value for name, value in found.items()}

    wrap(patch, StageRun, "forward", turned)


@bug("opaque-adamw", STAGES, causes="stages|forward|stale|unknown", module="second")
@bug("opaque-adamw", "tp=2", causes="stages|forward|stale|unknown|division", module="second")
def an_opaque_part_computes_with_rounded_weights(patch: Patch) -> None:
    def prepared(right: Any, self: Replica) -> Any:
        yield from right(self)
        part: Any = self.model.get_submodule("second")

        def forward(x: Tensor) -> Tensor:
            weight = part.weight + (part.weight.bfloat16().to(part.weight.dtype) - part.weight).detach()
            return torch.nn.functional.linear(x, weight, part.bias)

        part.forward = forward

    wrap(patch, Replica, "prepare", prepared)
