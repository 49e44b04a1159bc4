"""Layers with outputs sharded over the ranks, together with resharding of their input.

Eager autograd computes dX and dW of each layer in one node, adds up the dX, and only then communicates. Here,
backward starts to gather x again (it was not kept), computes dX of all layers, starts its sum over the ranks,
and computes every dW meanwhile: one collective for all layers that read x, overlapped with their weights'
gradients (Korthikanti et al., 2022, section 4).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshloom.comm.group import Group
from meshloom.program.operators.collectives import Joint, Transition, start_gather, start_sum_back

T = TypeVar("T")
Wanted = tuple[bool, bool]  # whether autograd wants the gradients of a weight and a bias
Pair = tuple[Tensor | None, Tensor | None]  # for a weight and a bias


@dataclass(frozen=True, kw_only=True)
class GatheredLayers(Joint):
    """change: the resharding of x, to replicated."""

    change: Transition

    @abstractmethod
    def biases(self) -> tuple[bool, ...]:
        """Whether each layer has a bias."""

    @abstractmethod
    def only(self, numbers: Sequence[int]) -> GatheredLayers:
        """Some of the layers, with a resharding of their own."""

    @abstractmethod
    def accumulates(self, weight: Tensor) -> bool:
        """Whether the gradient of a weight or bias is accumulated by the layer instead of autograd."""

    @abstractmethod
    def forward(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The result of one layer for the full x."""

    @abstractmethod
    def input_gradient(
        self, gradients: Sequence[Tensor], weights: Sequence[Tensor], shape: Sequence[int], x: Tensor
    ) -> Tensor:
        """The gradient of x [shape] from all layers, as a new tensor. x: this rank's part, whatever it is."""

    @abstractmethod
    def weight_gradients(
        self, layer: int, gradient: Tensor, x: Tensor, weight: Tensor, wanted: Wanted, accumulated: Pair
    ) -> Pair:
        """Gradients of a layer's weight and bias, those that autograd wants. x: in full. accumulated: the
        parameters themselves, if their gradients are accumulated by the layer."""

    def run(self, group: Group, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        """Run on this rank: x or its part, then w_0, b_0 (if any), w_1, ... -> result of each layer."""
        function: Any = _Layers.apply
        return function(self, group, x, *weights)

    def forwards(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Results of all layers for the full x."""
        return tuple(self.forward(layer, x, *pair) for layer, pair in enumerate(self.parted(weights)))

    def parted(self, weights: Sequence[T]) -> list[tuple[T, T | None]]:
        """Weight and bias of each layer."""
        rest = iter(weights)
        return [(next(rest), next(rest) if biased else None) for biased in self.biases()]


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layers: GatheredLayers, group: Group, x: Tensor, *weights: Tensor) -> Any:
        ctx.layers, ctx.group = layers, group
        # The parameters themselves: recomputation would unpack saved tensors as other ones.
        ctx.accumulated = [weight if layers.accumulates(weight) else None for weight in weights]
        ctx.save_for_backward(x, *weights)
        whole = start_gather(layers.change.before, group, x)() if layers.change.source == "part" else x
        return layers.forwards(whole, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        layers: GatheredLayers = ctx.layers
        group: Group = ctx.group
        x, *weights = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradients will be differentiated themselves
            needs = ctx.needs_input_grad[2:]
            wanted = [each for each, need in zip((x, *weights), needs, strict=True) if need]
            results = layers.forwards(layers.change.run(group, x), weights)
            some = iter(torch.autograd.grad(results, wanted, gradients, create_graph=True, allow_unused=True))
            return None, None, *(next(some) if need else None for need in needs)
        before = layers.change.before
        gathering = start_gather(before, group, x) if layers.change.source == "part" else None
        parted = layers.parted(weights)
        summing = None
        if ctx.needs_input_grad[2]:
            dx = layers.input_gradient(gradients, [weight for weight, _ in parted], before.shape, x)
            summing = start_sum_back(layers.change, group, dx, ours=True)
        whole = gathering() if gathering else x
        found: list[Tensor | None] = []
        wanted, accumulated = layers.parted(ctx.needs_input_grad[3:]), layers.parted(ctx.accumulated)
        for layer, (gradient, (weight, bias)) in enumerate(zip(gradients, parted, strict=True)):
            pair = layers.weight_gradients(
                layer, gradient, whole, weight, (wanted[layer][0], bool(wanted[layer][1])), accumulated[layer]
            )
            found += pair if bias is not None else pair[:1]
        return None, None, summing() if summing else None, *found
