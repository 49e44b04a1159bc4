"""Fuses gradient accumulation into the backward of a program's linear layers
(`fused_grad_accumulation.py`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from meshloom.program.cost.program_seconds import weights_that_wait
from meshloom.program.ir.nodes import Node, Ref
from meshloom.program.ir.program import Program
from meshloom.program.operators.fused_grad_accumulation import GradAccumulator, can_accumulate
from meshloom.program.operators.linears import GatheredLinears, weight_gradients

# of a weight. Below, an operator in Python takes longer than the copy it saves (measured on a CPU: 25 us)
MIN_ELEMENTS = 2**17


@dataclass(frozen=True, eq=False)
class FusedLinear:
    """A linear layer whose weights are parameters and accumulate their own gradients."""

    accumulator: GradAccumulator

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [b*, k], weight [o, k], bias [o] -> [b*, o]."""
        function: Any = _Linear.apply
        return function(self.accumulator, x, weight, bias)


def with_fused_accumulation(
    program: Program, accumulator: GradAccumulator, *, min_elements: int | None = MIN_ELEMENTS
) -> Program:
    """The program with the gradients of its linear layers' weights accumulated by `accumulator`.

    min_elements: layers without communication and with smaller weights are unchanged; 0: all are fused; None: none
        without communication is.
    Layers in autocast regions, where weights are cast, are unchanged, as are frozen and computed weights.
    """
    parameters = {each.value: each.meta for each in program.parameters.values() if each.meta.requires_grad}
    apart = weights_that_wait(program)

    def changed(node: Node) -> Node:
        if isinstance(node.target, GatheredLinears) and not node.kwargs:
            weights = [each for each in node.args[1:] if each is not None]
            if all(isinstance(each, Ref) and each.name in parameters for each in weights):
                return replace(node, target=replace(node.target, accumulator=accumulator))
        if (
            min_elements is None
            or node.name not in apart
            or math.prod(parameters[node.args[1].name].shape) < min_elements
        ):
            return node
        return replace(node, target=FusedLinear(accumulator))

    return replace(program, nodes=tuple(map(changed, program.nodes)))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, accumulator: GradAccumulator, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        # The parameters themselves: recomputation would unpack saved tensors as other ones.
        given = (weight, bias)
        ctx.accumulator = accumulator
        ctx.accumulated = tuple(each if each is not None and can_accumulate(each) else None for each in given)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        dx = gradient.matmul(weight) if ctx.needs_input_grad[1] else None
        wanted = ctx.needs_input_grad[2:]
        return None, dx, *weight_gradients(gradient, x, wanted, ctx.accumulator, ctx.accumulated)
