"""Convolutions that divide their output channels over the ranks, together with the change of placement of their input.

As `linears.py`: backward starts gathering x again (it was not kept), computes dX of all layers, starts its sum over the ranks, and
computes every dW while that travels. Layers that read the same x, like a residual block's first one and its shortcut, share one collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshloom.comm.group import Group
from meshloom.graph.collectives import Transition, start_gather, start_sum

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """One layer.

    operator: aten.conv1d, conv2d or conv3d, with one group. stride, padding, dilation: per dim of the picture.
    A rank may have none of the output channels, which kernels do not like.
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

    def backward(self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of x, weight and bias, those that are wanted."""
        if not weight.shape[0]:
            return torch.zeros_like(x, memory_format=torch.contiguous_format), torch.zeros_like(weight), weight.new_zeros(0)
        sizes = [weight.shape[0]] if self.biased else None
        zeros = [0] * len(self.stride)
        return aten.convolution_backward(gradient, x, weight, sizes, self.stride, self.padding, self.dilation, False, zeros, 1, wanted)

    def _places(self, sizes: Sequence[int], kernel: Sequence[int]) -> list[int]:
        settings = zip(sizes, kernel, self.stride, self.padding, self.dilation, strict=True)
        return [(size + 2 * padding - dilation * (width - 1) - 1) // stride + 1 for size, width, stride, padding, dilation in settings]


@dataclass(frozen=True, kw_only=True)
class GatheredConvolutions:
    """change: of x, to replicated."""

    change: Transition
    layers: tuple[Convolution, ...]

    def run(self, group: Group, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        """On this rank: x [b, c, ...] or its part, weights w_0 [o_0, c, ...], b_0 [o_0], w_1, ... -> [b, o_i, ...] for each layer."""
        function: Any = _Layers.apply
        return function(self, group, x, *weights)

    def run_all(self, xs: Sequence[Tensor], *weights: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """On all ranks at once."""
        everywhere = self.change.run_all(xs)
        return [
            tuple(layer.forward(x, weight, bias) for layer, weight, bias in self.with_weights([column[rank] for column in weights]))
            for rank, x in enumerate(everywhere)
        ]

    def with_weights(self, weights: Sequence[Tensor]) -> list[tuple[Convolution, Tensor, Tensor | None]]:
        """Each layer with its weight and bias."""
        rest = iter(weights)
        return [(layer, next(rest), next(rest) if layer.biased else None) for layer in self.layers]


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layers: GatheredConvolutions, group: Group, x: Tensor, *weights: Tensor) -> Any:
        ctx.layers, ctx.group = layers, group
        ctx.save_for_backward(x, *weights)
        whole = start_gather(layers.change.before, group, x)() if layers.change.source == "part" else x
        return tuple(layer.forward(whole, weight, bias) for layer, weight, bias in layers.with_weights(weights))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        layers: GatheredConvolutions = ctx.layers
        group: Group = ctx.group
        x, *weights = ctx.saved_tensors
        divided = layers.change.source == "part"
        before = layers.change.before
        gathering = start_gather(before, group, x) if divided else None
        all_layers = layers.with_weights(weights)
        like = x.new_empty(before.shape) if divided else x  # dX asks for the shape of x alone
        summing = None
        if ctx.needs_input_grad[2]:
            dx: Tensor | None = None
            for gradient, (layer, weight, _) in zip(gradients, all_layers, strict=True):
                one = layer.backward(gradient, like, weight, [True, False, False])[0]
                dx = one if dx is None else dx.add_(one)
            assert dx is not None
            summing = start_sum(before, group, dx, ours=True)
        whole = gathering() if gathering else x
        found: list[Tensor | None] = []
        for gradient, (layer, weight, bias) in zip(gradients, all_layers, strict=True):
            at = 3 + len(found)
            wanted = [False, ctx.needs_input_grad[at], bias is not None and ctx.needs_input_grad[at + 1]]
            made = layer.backward(gradient, whole, weight, wanted) if any(wanted) else (None, None, None)
            found += made[1:] if bias is not None else made[1:2]
        return None, None, summing() if summing else None, *found
