"""The mean of what ranks have added up: one division, at the end."""

from __future__ import annotations

from torch import Tensor


def divide(total: Tensor, count: int) -> None:
    """Divide a sum over `count` ranks in place, of any shape and dtype; quotients of integers are cut off.

    >>> import torch
    >>> total = torch.tensor([7, -7])
    >>> divide(total, 2)
    >>> total
    tensor([ 3, -3])
    """
    total.copy_(total / count)
