"""Elementwise reductions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from meshloom.comm.group import ReduceOp


def combine(total: Tensor, other: Tensor, op: ReduceOp) -> None:
    """Reduce `other` into `total`, of the same shape; an average is a sum, divided later.

    Raises what torch raises for a dtype without that reduction.
    """
    if op == "max":
        torch.maximum(total, other, out=total)
    elif op == "min":
        torch.minimum(total, other, out=total)
    else:
        total.add_(other)


def divide(total: Tensor, count: int) -> None:
    """Divide a sum over `count` ranks in place; quotients of integers are truncated.

    >>> total = torch.tensor([7, -7])
    >>> divide(total, 2)
    >>> total
    tensor([ 3, -3])
    """
    total.copy_(total / count)
