"""Gradients of weights that are computed later than those of inputs, so that other ranks need not wait for them.

I   dX = dY W, and (X, dY) are put aside        W   W.grad += dY^T X, b.grad += sum of dY
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from meshloom.comm.group import Group
from meshloom.graph.nodes import Node, Ref
from meshloom.graph.program import Program

aten = torch.ops.aten


class Later:
    """What was put aside in a backward. collecting: whether backwards put aside at all; otherwise they compute all at once."""

    def __init__(self) -> None:
        self.collecting = False
        self._pending: list[Callable[[], None]] = []

    def add(self, compute: Callable[[], None]) -> None:
        """Put a computation aside."""
        self._pending.append(compute)

    def take(self) -> list[Callable[[], None]]:
        """All that was put aside, to be called in turn."""
        pending, self._pending = self._pending, []
        return pending


@dataclass(frozen=True, eq=False)
class LaterLinear:
    """A linear layer whose weights are parameters."""

    later: Later
    is_local: ClassVar[bool] = True  # no rank needs another's

    def run(self, group: Group | None, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [b*, k], weight [o, k], bias [o] -> [b*, o]."""
        function: Any = _Linear.apply
        return function(self.later, x, weight, bias)

    def run_all(self, xs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None) -> list[Tensor]:
        """On several ranks at once."""
        return [self.run(None, x, weight, bias) for x, weight, bias in zip(xs, weights, biases or [None] * len(xs), strict=True)]


def with_later_weights(program: Program, later: Later) -> Program:
    """The program with its linear layers' weight gradients put aside into `later` when that collects. Autocast regions stay as they are."""
    parameters = {each.value for each in program.parameters.values() if each.meta.requires_grad}

    def changed(node: Node) -> Node:
        if node.target is not aten.linear.default or node.kwargs or not node.context.grad or any(each.enabled for each in node.context.autocast):
            return node
        weights = [each for each in node.args[1:] if each is not None]
        if not all(isinstance(each, Ref) and each.name in parameters for each in weights):
            return node
        return replace(node, target=LaterLinear(later))

    return replace(program, nodes=tuple(map(changed, program.nodes)), _runners={})


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, later: Later, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.later, ctx.weight, ctx.bias = later, weight, bias  # the parameters themselves, whose gradients they will be
        ctx.save_for_backward(x)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        dx = gradient.matmul(weight) if ctx.needs_input_grad[1] else None
        rows, inputs = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        if ctx.later.collecting:
            ctx.later.add(lambda: _accumulate(weight, bias, rows, inputs))
            return None, dx, None, None
        return None, dx, rows.t().mm(inputs), None if bias is None else rows.sum(0)


def _accumulate(weight: Tensor, bias: Tensor | None, rows: Tensor, inputs: Tensor) -> None:
    with torch.no_grad():
        if weight.grad is None:
            weight.grad = rows.t().mm(inputs)
        else:
            weight.grad.addmm_(rows.t(), inputs)
        if bias is not None:
            bias.grad = rows.sum(0) if bias.grad is None else bias.grad.add_(rows.sum(0))
