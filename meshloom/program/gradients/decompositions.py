"""Backward operators of ATen that a trace takes apart, as their parts can be divided and they cannot.

Some return several gradients at once, of which some are sums over what another keeps; others write a part of a tensor
of zeros or divide by a number of elements that they count themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshloom.program.operators.convolution_gradients import gradients_apart

_aten: Any = torch.ops.aten
_BY_TORCH = [
    _aten._softmax_backward_data, _aten._log_softmax_backward_data,
    _aten.nll_loss_forward, _aten.nll_loss_backward, _aten.nll_loss2d_forward, _aten.nll_loss2d_backward,
    _aten.mse_loss_backward, _aten.smooth_l1_loss_backward, _aten.huber_loss_backward, _aten.binary_cross_entropy_backward,
    _aten.slice_backward, _aten.select_backward,
]  # fmt: skip


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Operator -> a function of its arguments that calls others instead."""
    # imported here: takes a second, which most processes save
    from torch._decomp import get_decompositions

    of_batches = _aten.native_batch_norm_backward.default, _aten.native_group_norm_backward.default
    return {
        **get_decompositions(_BY_TORCH),
        **{each: _if_final(function) for each, function in get_decompositions(of_batches).items()},
        _aten.native_layer_norm_backward.default: _layer_norm_backward,
        _aten.convolution_backward.default: gradients_apart,
    }


def _if_final(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Takes an operator apart only where nothing takes its gradient: its statistics are operands, whose own
    gradients the parts would miss."""
    return lambda *args, **kwargs: (
        NotImplemented if torch.is_grad_enabled() else decomposition(*args, **kwargs)
    )


def _layer_norm_backward(
    gradient: Tensor, x: Tensor, shape: list[int], mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, wanted: list[bool],
) -> Any:  # fmt: skip
    """Gradients of layer norm by x [..., *shape], weight [*shape] and bias.

    mean, rstd [..., 1...]: of the forward. Where gradients are taken of these gradients, they are computed again
    from x, as those that the forward saves have none; rstd gives the epsilon that was added.
    """
    if not x.dtype == gradient.dtype == rstd.dtype or not shape:
        return NotImplemented
    normalised = list(range(x.dim() - len(shape), x.dim()))
    leading = list(range(x.dim() - len(shape)))
    if torch.is_grad_enabled():
        mean = x.mean(normalised, keepdim=True)
        variance = (x - mean).pow(2).mean(normalised, keepdim=True)
        rstd = (variance + (rstd.pow(-2) - variance).detach()).rsqrt()
    x_hat = (x - mean) * rstd
    scaled = gradient if weight is None else gradient * weight
    by_x = scaled - scaled.mean(normalised, keepdim=True)
    by_x = rstd * (by_x - x_hat * (scaled * x_hat).mean(normalised, keepdim=True))
    product = gradient * x_hat
    by_weight, by_bias = ((each.sum(leading) if leading else each) for each in (product, gradient))
    return tuple(
        each if asked else None for each, asked in zip((by_x, by_weight, by_bias), wanted, strict=True)
    )
