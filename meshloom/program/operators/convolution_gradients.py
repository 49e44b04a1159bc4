"""The two gradients of a convolution, each an operator of one result, which can be divided and has gradients itself.

ATen's `convolution_backward` returns both, and that of the bias, as one tuple. With y = x * w (`*` for the convolution):

    dx = input_gradient(g, w)      its gradient v:  by g  v * w                  by w  weight_gradient(g, v)
    dw = weight_gradient(g, x)     its gradient v:  by g  x * v                  by x  input_gradient(g, v)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_aten: Any = torch.ops.aten
_AS = "SymInt[] size, SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups"

_library = torch.library.Library("meshloom", "FRAGMENT")
_library.define(f"convolution_input_gradient(Tensor gradient, Tensor weight, {_AS}) -> Tensor")
_library.define(f"convolution_weight_gradient(Tensor gradient, Tensor input, {_AS}) -> Tensor")

_ops: Any = torch.ops
INPUT_GRADIENT = _ops.meshloom.convolution_input_gradient.default
WEIGHT_GRADIENT = _ops.meshloom.convolution_weight_gradient.default


def gradients_apart(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    *rest: Any,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`convolution_backward` as one operator for each result that is wanted; the last of `rest` says which."""
    *how, wanted = rest
    of_channel = [0, *range(2, gradient.dim())]
    return (
        INPUT_GRADIENT(gradient, weight, list(x.shape), *how) if wanted[0] else None,
        WEIGHT_GRADIENT(gradient, x, list(weight.shape), *how) if wanted[1] else None,
        gradient.sum(of_channel) if wanted[2] else None,
    )


def _input_gradient(gradient: Tensor, weight: Tensor, size: Sequence[int], *how: Any) -> Tensor:
    x = gradient.new_empty(1).expand(size)  # only its shape counts
    return _aten.convolution_backward(gradient, x, weight, None, *how, [True, False, False])[0].contiguous()


def _weight_gradient(gradient: Tensor, x: Tensor, size: Sequence[int], *how: Any) -> Tensor:
    weight = gradient.new_empty(1).expand(size)
    return _aten.convolution_backward(gradient, x, weight, None, *how, [False, True, False])[1].contiguous()


def _fake(gradient: Tensor, other: Tensor, size: Sequence[int], *how: Any) -> Tensor:
    return gradient.new_empty(size)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gradient, other, _, *ctx.how = inputs
    ctx.save_for_backward(gradient, other)


def _input_gradient_backward(context: Any, incoming: Tensor) -> tuple[Any, ...]:
    gradient, weight = context.saved_tensors
    how = context.how
    return (
        _aten.convolution(incoming, weight, None, *how) if context.needs_input_grad[0] else None,
        WEIGHT_GRADIENT(gradient, incoming, list(weight.shape), *how) if context.needs_input_grad[1] else None,
        *[None] * (1 + len(how)),
    )  # fmt: skip


def _weight_gradient_backward(context: Any, incoming: Tensor) -> tuple[Any, ...]:
    gradient, x = context.saved_tensors
    how = context.how
    return (
        _aten.convolution(x, incoming, None, *how) if context.needs_input_grad[0] else None,
        INPUT_GRADIENT(gradient, incoming, list(x.shape), *how) if context.needs_input_grad[1] else None,
        *[None] * (1 + len(how)),
    )


for _name, _run, _backward in (
    ("convolution_input_gradient", _input_gradient, _input_gradient_backward),
    ("convolution_weight_gradient", _weight_gradient, _weight_gradient_backward),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"meshloom::{_name}", _fake, lib=_library)
    torch.library.register_autograd(f"meshloom::{_name}", _backward, setup_context=_keep, lib=_library)
