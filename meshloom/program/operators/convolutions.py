"""Convolutions with output channels sharded over the ranks, together with resharding of their input
(`gathered.py`): a residual block's first layer and its shortcut share one collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshloom.program.operators.gathered import GatheredLayers, Pair, Wanted

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """One layer.

    operator: aten.conv1d, conv2d or conv3d, with one group. stride, padding, dilation: per spatial dim.
    A rank may have no output channels, which kernels do not support.
    """

    operator: Any
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    biased: bool

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [b, c, ...], weight [o, c, ...], bias [o] -> [b, o, ...]."""
        if not weight.shape[0]:
            return x.new_empty(x.shape[0], 0, *self._places(x.shape[2:], weight.shape[2:]))
        return self.operator(x, weight, bias, self.stride, self.padding, self.dilation)

    def backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of x, weight and bias, those that are wanted."""
        if not weight.shape[0]:
            dx = torch.zeros_like(x, memory_format=torch.contiguous_format)
            return dx, torch.zeros_like(weight), weight.new_zeros(0)
        sizes = [weight.shape[0]] if self.biased else None
        zeros = [0] * len(self.stride)
        return aten.convolution_backward(
            gradient, x, weight, sizes, self.stride, self.padding, self.dilation, False, zeros, 1, wanted
        )

    def _places(self, sizes: Sequence[int], kernel: Sequence[int]) -> list[int]:
        settings = zip(sizes, kernel, self.stride, self.padding, self.dilation, strict=True)
        return [
            (size + 2 * padding - dilation * (width - 1) - 1) // stride + 1
            for size, width, stride, padding, dilation in settings
        ]


@dataclass(frozen=True, kw_only=True)
class GatheredConvolutions(GatheredLayers):
    """x [b, c, ...], weights w_0 [o_0, c, ...], b_0 [o_0], w_1, ... -> [b, o_i, ...] for each layer."""

    layers: tuple[Convolution, ...]

    def biases(self) -> tuple[bool, ...]:
        return tuple(layer.biased for layer in self.layers)

    def only(self, numbers: Sequence[int]) -> GatheredConvolutions:
        return replace(self, layers=tuple(self.layers[number] for number in numbers))

    def accumulates(self, weight: Tensor) -> bool:
        return False  # its kernel allocates its result in any case

    def forward(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.layers[layer].forward(x, weight, bias)

    def input_gradient(
        self, gradients: Sequence[Tensor], weights: Sequence[Tensor], shape: Sequence[int], x: Tensor
    ) -> Tensor:
        # the kernel only reads the shape of x
        like = x if tuple(x.shape) == tuple(shape) else x.new_empty(shape)
        dx, *others = (
            layer.backward(gradient, like, weight, [True, False, False])[0]
            for layer, gradient, weight in zip(self.layers, gradients, weights, strict=True)
        )
        for other in others:
            dx.add_(other)
        return dx

    def weight_gradients(
        self, layer: int, gradient: Tensor, x: Tensor, weight: Tensor, wanted: Wanted, accumulated: Pair
    ) -> Pair:
        if not any(wanted):
            return None, None
        _, of_weight, of_bias = self.layers[layer].backward(gradient, x, weight, [False, *wanted])
        return of_weight, of_bias
