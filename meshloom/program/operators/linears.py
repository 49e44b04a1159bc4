"""Linear layers with sharded outputs, with resharding of their common input (`gathered.py`): q, k, v of a
block.

y_i = x w_i^T + b_i      x is sharded or invariant; every rank has some rows of every w_i
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.nn import functional as F

from meshloom.program.operators.fused_grad_accumulation import GradAccumulator, can_accumulate
from meshloom.program.operators.gathered import GatheredLayers, Pair, Wanted


@dataclass(frozen=True, kw_only=True)
class GatheredLinears(GatheredLayers):
    """x [b*, k], weights w_0 [o_0, k], b_0 [o_0], w_1, ... -> [b*, o_i]. biased: whether each has a bias.

    accumulator: accumulates the gradients of weights that are parameters; None: autograd does.
    """

    biased: tuple[bool, ...]
    accumulator: GradAccumulator | None = field(default=None, repr=False, compare=False)

    def biases(self) -> tuple[bool, ...]:
        return self.biased

    def only(self, numbers: Sequence[int]) -> GatheredLinears:
        return replace(self, biased=tuple(self.biased[number] for number in numbers))

    def accumulates(self, weight: Tensor) -> bool:
        return self.accumulator is not None and can_accumulate(weight)

    def forward(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def input_gradient(
        self, gradients: Sequence[Tensor], weights: Sequence[Tensor], shape: Sequence[int], x: Tensor
    ) -> Tensor:
        dx = _rows(gradients[0]).mm(weights[0])
        for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
            dx.addmm_(_rows(gradient), weight)
        return dx.view(shape)

    def weight_gradients(
        self, layer: int, gradient: Tensor, x: Tensor, weight: Tensor, wanted: Wanted, accumulated: Pair
    ) -> Pair:
        accumulator = self.accumulator
        if accumulator and self.change.source == "part":
            # A gathered input is not kept for deferred gradients: it was gathered again to save memory.
            accumulator = accumulator.now
        return weight_gradients(gradient, x, wanted, accumulator, accumulated)


def weight_gradients(
    gradient: Tensor, x: Tensor, wanted: Wanted, accumulator: GradAccumulator | None, accumulated: Pair
) -> Pair:
    """Gradients of a layer's weight and bias, those that are wanted and not accumulated by `accumulator`:
    gradient [b*, o], x [b*, k] -> [o, k], [o]."""
    rows, inputs = _rows(gradient), _rows(x)
    weight, bias = accumulated
    if accumulator and (weight is not None or bias is not None):
        accumulator.add(weight, bias, rows, inputs)
    dw = rows.t().mm(inputs) if wanted[0] and weight is None else None
    return dw, rows.sum(0) if wanted[1] and bias is None else None


def _rows(value: Tensor) -> Tensor:
    return value.reshape(math.prod(value.shape[:-1]), value.shape[-1])  # a rank may have no outputs
