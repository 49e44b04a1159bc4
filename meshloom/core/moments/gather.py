"""`meshloom.gather()`: the rows of all replicas, for a loss over pairs of samples of the whole batch."""

from __future__ import annotations

import torch
from torch import Tensor

from meshloom.core.errors import JobError
from meshloom.core.moments.current_step import now


def gather(x: Tensor) -> Tensor:
    """Return the rows of every replica's `x`, in the order of the batch.

    x: [rows, ...], of any dtype; rows may differ between replicas, all else is alike. Returns [sum of all rows, ...].

    For a loss that compares samples of a batch with each other, as a contrastive one does, in the loss or in a module's
    forward. Gradients flow to the replicas that the rows are from, added up over all replicas' uses. So a replica's loss is the
    mean over its own rows against the rows of all, or the mean over all rows, the same on every replica: either is what one
    device has on the whole batch. Every replica calls it equally often.

    On one device, and outside of meshloom, it returns `x`. Raises `JobError` for what has no rows.

    >>> x = torch.ones(3, 2)
    >>> gather(x) is x
    True
    """
    if not isinstance(x, Tensor) or not x.ndim or x.layout != torch.strided:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise JobError(
            f"meshloom.gather() takes a dense tensor whose first dim are the samples, not {_kind(x)}. Use x.unsqueeze(0) for one row, x.to_dense() for a sparse tensor."
        )
    answer = now().gather
    return x if answer is None else answer(x)


def _kind(x: object) -> str:
    if not isinstance(x, Tensor):
        return f"a {type(x).__name__}"
    return "a tensor without dims" if not x.ndim else f"one of layout {str(x.layout).removeprefix('torch.')}"
