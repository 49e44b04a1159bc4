"""Log-softmax along a sharded dim: two small all-reduces, and each rank keeps its part of the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshloom.comm.group import Group
from meshloom.program.operators.collectives import (
    all_reducing,
    largest_of,
    refuse_second_derivative,
    total_of,
)

_Reduce = Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True, kw_only=True)
class LogSoftmaxOfPart:
    """Log-softmax along `dim` (non-negative). Per row it all-reduces its maximum and its sum of exponentials;
    in backward its gradient's sum."""

    dim: int

    def run(self, group: Group, x: Tensor) -> Tensor:
        """On this rank: x [*, part, *] -> the same."""
        function: Any = _LogSoftmax.apply
        return function(self.dim, all_reducing(group, "max"), all_reducing(group, "sum"), x)[0]

    def run_all(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Run on all ranks."""
        function: Any = _LogSoftmax.apply
        return list(function(self.dim, largest_of, total_of, *xs))

    def __str__(self) -> str:
        return f"log_softmax along a part of dim {self.dim}"


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dim: int, largest: _Reduce, total: _Reduce, *xs: Tensor) -> Any:
        top = largest([_largest(each, dim) for each in xs])
        sums = total([(each - top).exp().sum(dim, keepdim=True) for each in xs])
        results = [each - top - sums.log() for each in xs]
        ctx.dim, ctx.total = dim, total
        ctx.save_for_backward(*results)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_second_derivative()
        sums = ctx.total([each.sum(ctx.dim, keepdim=True) for each in gradients])
        pairs = zip(gradients, ctx.saved_tensors, strict=True)
        return None, None, None, *(gradient - result.exp() * sums for gradient, result in pairs)


def _largest(x: Tensor, dim: int) -> Tensor:
    """Maximum of each row [*, 1, *]; the lowest finite number for empty rows."""
    if x.shape[dim]:
        return x.amax(dim, keepdim=True)
    return x.new_full((*x.shape[:dim], 1, *x.shape[dim + 1 :]), torch.finfo(x.dtype).min)
