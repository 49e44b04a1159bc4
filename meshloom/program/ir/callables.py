"""What a running program calls besides ATen operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from meshloom.core.random import KeyedDraws, pass_over_draws


def out_of_place(op: Callable[..., Any], value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """What `op` would make of `value` in place.

    >>> import torch
    >>> out_of_place(torch.ops.aten.mul_.Tensor, torch.ones(2), 3)
    tensor([3., 3.])
    """
    return op(value.clone(), *args, **kwargs)


def keyed(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`op` with every random operation in it seeded anew from the one before. An `aten.lstm` with dropout has
    several."""
    with KeyedDraws():
        return op(*args, **kwargs)


def keyed_out_of_place(op: Callable[..., Any], value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """What `op`, which draws, would make of `value` in place."""
    with KeyedDraws():
        return op(value.clone(), *args, **kwargs)


def skip_draws(count: int) -> None:
    """Go on as if `count` random operations had been: they are another stage's."""
    pass_over_draws(count)
