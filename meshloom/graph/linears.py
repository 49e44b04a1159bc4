"""Linear layers that divide their outputs over the ranks, together with the change of placement of their input.

    y_i = x w_i^T + b_i      x comes in parts, or is invariant; every rank has some rows of every w_i

Eager autograd would compute dX and dW of each layer in one node, add the dX up, and only then start to talk. Here, backward starts gathering
x again (it was not kept), computes dX of all layers, starts its sum over the ranks, and computes every dW while that travels:
one collective for the q, k and v of a block, hidden behind their weights' gradients (Korthikanti et al., 2022, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from meshloom.comm.group import Group
from meshloom.graph.collectives import Transition, start_gather, start_sum


@dataclass(frozen=True, kw_only=True)
class GatheredLinears:
    """change: of x, to replicated. biased: for every layer, whether it has a bias."""

    change: Transition
    biased: tuple[bool, ...]

    def run(self, group: Group, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        """On this rank: x [b*, k] or its part, weights w_0 [o_0, k], b_0 [o_0], w_1, ... -> [b*, o_i] for each layer."""
        function: Any = _Layers.apply
        return function(self, group, x, *weights)

    def run_all(self, xs: Sequence[Tensor], *weights: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """On all ranks at once."""
        everywhere = self.change.run_all(xs)
        return [
            tuple(F.linear(x, weight, bias) for weight, bias in self.layers([column[rank] for column in weights]))
            for rank, x in enumerate(everywhere)
        ]

    def layers(self, weights: Sequence[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
        """Weight and bias of each layer."""
        rest = iter(weights)
        return [(next(rest), next(rest) if biased else None) for biased in self.biased]


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, linears: GatheredLinears, group: Group, x: Tensor, *weights: Tensor) -> Any:
        ctx.linears, ctx.group = linears, group
        ctx.save_for_backward(x, *weights)
        whole = start_gather(linears.change.before, group, x)() if linears.change.source == "part" else x
        return tuple(F.linear(whole, weight, bias) for weight, bias in linears.layers(weights))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        linears: GatheredLinears = ctx.linears
        group: Group = ctx.group
        x, *weights = ctx.saved_tensors
        divided = linears.change.source == "part"
        gathering = start_gather(linears.change.before, group, x) if divided else None
        layers = linears.layers(weights)
        flat = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
        summing = None
        if ctx.needs_input_grad[2]:
            dx = flat[0].mm(layers[0][0])
            for gradient, (weight, _) in zip(flat[1:], layers[1:], strict=True):
                dx.addmm_(gradient, weight)
            summing = start_sum(linears.change.before, group, dx.view(*gradients[0].shape[:-1], dx.shape[1]), ours=True)
        whole = gathering() if gathering else x
        rows = whole.reshape(-1, whole.shape[-1])
        found: list[Tensor | None] = []
        for gradient, (_, bias) in zip(flat, layers, strict=True):
            found.append(gradient.t().mm(rows) if ctx.needs_input_grad[3 + len(found)] else None)
            if bias is not None:
                found.append(gradient.sum(0) if ctx.needs_input_grad[3 + len(found)] else None)
        return None, None, summing() if summing else None, *found
