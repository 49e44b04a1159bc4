"""Autocast on the second device, as the CPU's: operators of the models that are rehearsed compute in the precision that it gives them there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_KEY: Any = _C.DispatchKeySet(_C.DispatchKey.AutocastPrivateUse1)
_ROUNDED = "linear matmul mm bmm addmm baddbmm conv1d conv2d prelu scaled_dot_product_attention"
_IN_FLOAT32 = "cross_entropy_loss nll_loss nll_loss2d mse_loss l1_loss smooth_l1_loss binary_cross_entropy_with_logits kl_div prod"
_AS_THE_WIDEST = "cat stack"


def let_autocast_cast(name: str) -> Any:
    """Registered as long as what is returned is held. name: of the device. Other operators are called as they are; float64 is never cast."""
    library = torch.library.Library("aten", "IMPL")
    for operators, dtype_of in (
        (_ROUNDED, lambda _: torch.get_autocast_dtype(name)),
        (_IN_FLOAT32, lambda _: torch.float32),
        (_AS_THE_WIDEST, _widest),
    ):
        for operator in operators.split():
            default = getattr(torch.ops.aten, operator).default
            library.impl(operator, partial(_cast, name, default, dtype_of), "AutocastPrivateUse1")
    return library


def _cast(
    name: str, operator: Any, dtype_of: Callable[[list[Tensor]], torch.dtype], *args: Any, **kwargs: Any
) -> Any:
    def is_cast(each: Any) -> bool:
        return (
            isinstance(each, Tensor)
            and each.device.type == name
            and each.is_floating_point()
            and each.dtype != torch.float64
        )

    with _C._ExcludeDispatchKeyGuard(_KEY):
        dtype = dtype_of([each for each in tree_flatten((args, kwargs))[0] if is_cast(each)])
        args, kwargs = tree_map(lambda each: each.to(dtype) if is_cast(each) else each, (args, kwargs))
        return operator(*args, **kwargs)


def _widest(tensors: list[Tensor]) -> torch.dtype:
    """That which holds all; any, if there are none."""
    return max(
        (each.dtype for each in tensors),
        key=lambda dtype: torch.finfo(dtype).max * dtype.itemsize,
        default=torch.float32,
    )
