"""Cost of one ATen call: floating-point operations by torch's formulas, bytes read and written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter
from torch.utils._pytree import tree_leaves

from meshloom.program.ir.schemas import arguments_of, is_written
from meshloom.program.ir.sparse_constants import dense_parts, memory_of
from meshloom.program.opaque.call import OpaqueCall
from meshloom.program.opaque.operator import OPAQUE, OPAQUE_BACKWARD

aten = torch.ops.aten
_flop_counter: Any = flop_counter  # its formulas by operator have no types

# Of their first tensor these read as much as they return.
_PICK = {"embedding", "index", "index_select", "gather", "take", "_index_put_impl"}
# These write without reading what was there.
_OVERWRITE = {
    "copy_",
    "fill_",
    "zero_",
    "set_",
    "uniform_",
    "normal_",
    "bernoulli_",
    "random_",
    "exponential_",
}
_OPAQUE = {OPAQUE, OPAQUE_BACKWARD}
_ALLOCATE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], value: Any) -> int:
    """FLOPs of an ATen call: matrix products, convolutions, attention, fused recurrent layers, opaque calls; else 0."""
    if func in _OPAQUE:
        cost = OpaqueCall.of(args[3]).cost
        return cost.flops if func is OPAQUE else cost.backward_flops
    formula = _FORMULAS.get(func.overloadpacket) or _FORMULAS_BY_NAME.get(func.name())
    return int(formula(*args, **kwargs, out_val=value)) if formula else 0


def bytes_read_and_written(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], value: Any
) -> tuple[int, int]:
    """Bytes that an ATen call reads and writes, each element once; 0 for views and allocations."""
    if func in _OPAQUE:
        cost = OpaqueCall.of(args[3]).cost
        forward = cost.read_bytes, cost.written_bytes
        return forward if func is OPAQUE else (cost.backward_read_bytes, cost.backward_written_bytes)
    name = func.overloadpacket.__name__
    outputs = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    if name in _ALLOCATE or not outputs:
        return 0, 0
    operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    held = {memory_of(each) for each in operands}
    written = sum(_num_bytes(each) for each in outputs if memory_of(each) not in held)
    if func._schema.is_mutable:
        updated = [given for argument, given in arguments_of(func, args, kwargs) if is_written(argument)]
        written += sum(_num_bytes(each) for each in tree_leaves(updated) if isinstance(each, Tensor))
        operands = operands[1:] if name in _OVERWRITE else operands
    elif not written:
        return 0, 0
    if name in _PICK:
        return sum(_num_bytes(each) for each in outputs) + sum(map(_num_bytes, operands[1:])), written
    return sum(map(_num_bytes, operands)), written


def _num_bytes(tensor: Tensor) -> int:
    """Bytes of its distinct elements: expanded ones count once."""
    total = 0
    for part in dense_parts(tensor):
        count = 1
        for size, stride in zip(part.shape, part.stride(), strict=True):
            count *= int(size) if stride or not size else 1
        total += count * part.element_size()
    return total


def _recurrent_layer(x: Any, w_x: Any, w_h: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """x [length, batch, features] times w_x [gates, features], and states times w_h [gates, hidden]."""
    return 2 * x[0] * x[1] * (w_x[0] * w_x[1] + w_h[0] * w_h[1])


def _recurrent_layer_backward(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * _recurrent_layer(*args)


def _grouped_product(x: Any, w: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """x [rows, features] times the matrix of each row's group in w [groups, features, outputs]."""
    return 2 * x[-2] * x[-1] * w[-1] * (x[0] if len(x) == len(w) == 3 else 1)


def _grouped_product_backward(x: Any, w: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * _grouped_product(x, w)


def _trilinear(x: Any, w: Any, y: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """The sum of x w y, with dims of 1 inserted at the places in `args`: three operations per element."""
    shapes: list[list[int]] = []
    for shape, places in zip((x, w, y), args, strict=False):
        grown = list(shape)
        for place in places:
            grown.insert(place, 1)
        shapes.append(grown)
    return 3 * math.prod(map(max, *shapes))


def _convolution_gradient(
    gradient: Any, other: Any, size: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, *args: Any, of_weight: bool, out_shape: Any = None,
) -> int:  # fmt: skip
    """As many as the convolution itself has, from its input and weight, of which the gradient of one has the other."""
    x, weight = (other, size) if of_weight else (size, other)
    return 2 * gradient[0] * math.prod((x if transposed else gradient)[2:]) * math.prod(weight)


# Missing in torch's table: the attention and the recurrent layer of CPUs.
_FORMULAS: Mapping[Any, Any] = {
    **_flop_counter.flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: _flop_counter.sdpa_flop,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _flop_counter.sdpa_backward_flop,
    aten.mkldnn_rnn_layer: _flop_counter.shape_wrapper(_recurrent_layer),
    aten.mkldnn_rnn_layer_backward: _flop_counter.shape_wrapper(_recurrent_layer_backward),
    aten._trilinear: _flop_counter.shape_wrapper(_trilinear),
    aten._grouped_mm: _flop_counter.shape_wrapper(_grouped_product),
}
# Operators that libraries register on import.
_FORMULAS_BY_NAME: Mapping[str, Any] = {
    "transformers::grouped_mm_fallback": _flop_counter.shape_wrapper(_grouped_product),
    "transformers::grouped_mm_fallback_backward": _flop_counter.shape_wrapper(_grouped_product_backward),
    "meshloom::convolution_input_gradient": _flop_counter.shape_wrapper(
        partial(_convolution_gradient, of_weight=False)
    ),
    "meshloom::convolution_weight_gradient": _flop_counter.shape_wrapper(
        partial(_convolution_gradient, of_weight=True)
    ),
}
