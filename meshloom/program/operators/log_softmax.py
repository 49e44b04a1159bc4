"""Log-softmax along a sharded dim: two small all-reduces, and each rank keeps its part of the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshloom.comm.group import Group
from meshloom.program.operators.collectives import Joint, all_reduced, refuse_second_derivative


@dataclass(frozen=True, kw_only=True)
class LogSoftmaxOfPart(Joint):
    """Log-softmax along `dim` (non-negative). Per row it all-reduces its maximum and its sum of exponentials;
    in backward its gradient's sum."""

    dim: int

    def run(self, group: Group, x: Tensor) -> Tensor:
        """x [*, part, *] -> the same."""
        function: Any = _LogSoftmax.apply
        return function(self.dim, group, x)

    def __str__(self) -> str:
        return f"log_softmax along a part of dim {self.dim}"


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dim: int, group: Group, x: Tensor) -> Tensor:
        top = all_reduced(group, _largest(x, dim), "max")
        sums = all_reduced(group, (x - top).exp().sum(dim, keepdim=True), "sum")
        result = x - top - sums.log()
        ctx.dim, ctx.group = dim, group
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_second_derivative()
        total = all_reduced(ctx.group, gradient.sum(ctx.dim, keepdim=True), "sum")
        (result,) = ctx.saved_tensors
        return None, None, gradient - result.exp() * total


def _largest(x: Tensor, dim: int) -> Tensor:
    """Maximum of each row [*, 1, *]; the lowest finite number for empty rows."""
    if x.shape[dim]:
        return x.amax(dim, keepdim=True)
    return x.new_full((*x.shape[:dim], 1, *x.shape[dim + 1 :]), torch.finfo(x.dtype).min)
