"""What a plain loop in lower precision has: copies of parameters that are updated in their place, and a loss scale."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from meshloom.core.plan import Plan

LOWERED = {"bf16": torch.bfloat16}  # precisions of plans -> of parameters
INTERVAL = 2000  # updates after which a loss scale doubles


class ReferenceMasters:
    """What the optimizers of `model` update, by name: copies of its floating-point trained parameters, which are then rounded to
    `dtype`, as its buffers and batches are; the parameters themselves if there is no such dtype. Layers with running
    statistics stay as they are. precision: of the plan; "": no copies."""

    def __init__(self, model: nn.Module, precision: str) -> None:
        self.dtype = dtype = LOWERED.get(precision)
        named = dict(model.named_parameters())
        layers = [each for each in model.modules() if getattr(each, "running_var", None) is not None]
        kept = {id(each) for layer in layers for each in (*layer.parameters(), *layer.buffers())}
        self.all: dict[str, nn.Parameter] = {
            name: _copy(each)
            if dtype and each.requires_grad and each.is_floating_point() and id(each) not in kept
            else each
            for name, each in named.items()
        }
        self._rounded = {name: each for name, each in named.items() if each is not self.all[name]}
        if dtype:
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point() and id(tensor) not in kept:
                    tensor.data = tensor.data.to(dtype)

    def take_gradients(self) -> None:
        """Each copy gets its parameter's gradient, in its own precision."""
        for name, parameter in self._rounded.items():
            copy, gradient = self.all[name], parameter.grad
            copy.grad = None if gradient is None else gradient.to(copy.dtype)

    def round(self) -> None:
        """After an update: each parameter is its copy, rounded."""
        for name, parameter in self._rounded.items():
            self.all[name].grad = None
            parameter.data.copy_(self.all[name].data)

    def replace(self, name: str, value: Tensor) -> None:
        """Continue with this value of a copy."""
        self.all[name].detach().copy_(value)
        if name in self._rounded:
            self._rounded[name].data.copy_(self.all[name].data)


def _copy(parameter: nn.Parameter) -> nn.Parameter:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return nn.Parameter(parameter.detach().to(dtype, copy=True), requires_grad=parameter.requires_grad)


class ReferenceScale:
    """One device's own loss scale: a plain loop's, as in torch's recipe of automatic mixed precision.

    (loss * scale).backward();  gradients /= scale;  some not finite: no update, scale /= 2;  2,000 updates in a row: scale *= 2

    value: by which the next step's loss is multiplied; 1 under plans without a scale. overflowed: whether the newest step's gradients did."""

    def __init__(self, plan: Plan) -> None:
        self.is_used = plan.precision == "fp16-mixed"
        self.value = 65536.0 if self.is_used else 1.0
        self.overflowed = False
        self._updates = 0

    def look(self, gradients: Iterable[Tensor | None]) -> None:
        """Before an update: whether it is to be skipped."""
        self.overflowed = self.is_used and any(
            not bool(each.to_dense().isfinite().all()) for each in gradients if each is not None
        )

    def end(self) -> None:
        """After the update, or where it would have been."""
        self._updates = 0 if self.overflowed else self._updates + 1
        if self.overflowed:
            self.value /= 2
        elif self.is_used and self._updates == INTERVAL:
            self.value, self._updates = self.value * 2, 0
