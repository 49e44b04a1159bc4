"""Linear layers that divide their outputs over the ranks, with the change of placement of their input (`gathered.py`): q, k and v of a block.

y_i = x w_i^T + b_i      x comes in parts, or is invariant; every rank has some rows of every w_i
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from meshloom.graph.gathered import GatheredLayers


@dataclass(frozen=True, kw_only=True)
class GatheredLinears(GatheredLayers):
    """x [b*, k], weights w_0 [o_0, k], b_0 [o_0], w_1, ... -> [b*, o_i] for each layer. biased: for every layer, whether it has a bias."""

    biased: tuple[bool, ...]

    def biases(self) -> tuple[bool, ...]:
        return self.biased

    def forward(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def input_gradient(self, gradients: Sequence[Tensor], weights: Sequence[Tensor], shape: Sequence[int], x: Tensor) -> Tensor:
        dx = _rows(gradients[0]).mm(weights[0])
        for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
            dx.addmm_(_rows(gradient), weight)
        return dx.view(shape)

    def weight_gradients(
        self, layer: int, gradient: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        rows = _rows(gradient)
        return rows.t().mm(_rows(x)) if wanted[0] else None, rows.sum(0) if wanted[1] else None


def _rows(value: Tensor) -> Tensor:
    return value.reshape(-1, value.shape[-1])
