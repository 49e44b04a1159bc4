"""Callables of programs besides ATen operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from meshloom.core.random import KeyedDraws


def out_of_place(op: Callable[..., Any], value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The result that `op` would write to `value` in place.

    >>> import torch
    >>> out_of_place(torch.ops.aten.mul_.Tensor, torch.ones(2), 3)
    tensor([3., 3.])
    """
    return op(value.clone(), *args, **kwargs)


def keyed(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`op` with each of its random operations seeded from the one before; `aten.lstm` has several."""
    with KeyedDraws():
        return op(*args, **kwargs)


def keyed_out_of_place(op: Callable[..., Any], value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`out_of_place` for an `op` that draws, with `keyed` seeds."""
    return keyed(op, value.clone(), *args, **kwargs)
