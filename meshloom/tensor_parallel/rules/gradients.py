"""Backward operators, which a loss that takes gradients calls: divided as the forwards that they belong to."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from meshloom.tensor_parallel.rules.elementwise import elementwise
from meshloom.tensor_parallel.rules.factors import (
    FIRST_LINEAR,
    Dims,
    Factors,
    ShardSizes,
    broadcast_dims,
    labels_of,
)
from meshloom.tensor_parallel.rules.operator_call import Call, Rule, TensorArgument, set_argument


def _elementwise(call: Call) -> Factors | None:
    """Linear in the incoming gradient. Some have an empty operand where a device needs none."""
    return elementwise(call, FIRST_LINEAR) if all(each.meta.shape for each in call.operands) else None


def _pooling(call: Call) -> Factors | None:
    """gradient [b, c, space'], x [b, c, space] (and indices [b, c, space']) -> [b, c, space]: batch and
    channels may be sharded."""
    ndim = len(call.outputs[0].shape)
    batched = ndim - (3 if "3d" in call.name else 2)
    names, sizes = labels_of(call.outputs[0].shape, range(batched, ndim))
    return Factors(
        operands=(names,) * len(call.operands), outputs=(names,), sizes=sizes, linear=FIRST_LINEAR, nonempty=frozenset(sizes)
    )  # fmt: skip


def _embedding(call: Call) -> Factors | None:
    """gradient [i*, d], index [i*] -> rows [v, d], summed over i."""
    index = call.operands[1]
    if call.arguments.get("scale_grad_by_freq"):
        return None
    names, sizes = labels_of(index.shape)
    width = call.outputs[0].shape[1]
    return Factors(
        operands=((*names, "d"), names), outputs=((None, "d"),), sizes={**sizes, "d": width}, sums=frozenset(sizes), linear=FIRST_LINEAR
    )  # fmt: skip


def _convolution(call: Call, *, of_weight: bool) -> Factors | None:
    """gradient [b, o, space'] with w [o, i, space] -> x [b, i, space], a sum over o; with x -> w, a sum over b.

    Transposed: w [i, o, space]. With groups only b is sharded.
    """
    gradient, other = call.operands
    (out,) = call.outputs
    weight = out.shape if of_weight else other.shape
    space: Dims = (None,) * (len(weight) - 2)
    if len(gradient.shape) != len(weight):
        return None
    transposed, groups = bool(call.arguments["transposed"]), call.arguments["groups"]
    o, i = (None, None) if groups > 1 else ("o", "i")
    sizes = {"b": gradient.shape[0]}
    if groups == 1:
        sizes |= {"o": gradient.shape[1], "i": weight[0 if transposed else 1]}
    of_x: Dims = ("b", i, *space)
    kernel: Dims = (i, o, *space) if transposed else (o, i, *space)
    one, result, summed = (of_x, kernel, "b") if of_weight else (kernel, of_x, "o")

    def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardSizes) -> Any:
        return set_argument(target, args, kwargs, "size", tuple(shard.outputs[0]))

    return Factors(
        operands=(("b", o, *space), one), outputs=(result,), sizes=sizes, sums=frozenset({summed} & sizes.keys()), nonempty=frozenset(sizes),
        linear=(frozenset({0}), frozenset({1})), local=local,
    )  # fmt: skip


def _index_put(call: Call) -> Factors | None:
    """x with values [i*, rest] added or written where indices [i*] say: only the dims behind them may be sharded."""
    x, values = call.arguments["self"], call.arguments["values"]
    given: tuple[Any, ...] = call.arguments["indices"]
    places = [place for place, each in enumerate(given) if isinstance(each, TensorArgument)]
    if any("bool" in str(given[place].meta.dtype) for place in places):
        return None
    together = places == list(range(places[0], places[-1] + 1))
    names, sizes = labels_of(x.shape, places)
    picked = torch.broadcast_shapes(*(given[place].shape for place in places))
    start = places[0] if together else 0
    rest = [place for place in range(len(x.shape)) if place not in places]
    full: Dims = (
        *(names[each] for each in rest[:start]),
        *(None,) * len(picked),
        *(names[each] for each in rest[start:]),
    )
    shape = (*(x.shape[each] for each in rest[:start]), *picked, *(x.shape[each] for each in rest[start:]))
    dims: dict[int, Dims] = {each.number: (None,) * len(each.shape) for each in call.operands}
    dims[x.number], dims[values.number] = names, broadcast_dims(values.shape, full, shape)
    return Factors(
        operands=tuple(dims[number] for number in range(len(call.operands))), outputs=(names,), sizes=sizes,
        linear=(frozenset({x.number, values.number}),),
    )  # fmt: skip


def _diagonal_scatter(call: Call) -> Factors | None:
    """x with the diagonal of two dims replaced by the last dim of source: the other dims may be sharded."""
    x = call.operands[0]
    ndim = len(x.shape)
    names, sizes = labels_of(x.shape, {call.dim("dim1", ndim), call.dim("dim2", ndim)})
    rest = tuple(name for name in names if name is not None)
    return Factors(
        operands=(names, (*rest, None)), outputs=(names,), sizes=sizes, linear=(frozenset({0, 1}),)
    )


_ELEMENTWISE = (
    "tanh_backward", "sigmoid_backward", "threshold_backward", "gelu_backward", "silu_backward", "elu_backward", "leaky_relu_backward",
    "hardtanh_backward", "hardswish_backward", "hardsigmoid_backward", "hardshrink_backward", "softshrink_backward", "softplus_backward",
    "mish_backward", "log_sigmoid_backward", "native_dropout_backward",
)  # fmt: skip

GRADIENTS: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(
        [
            f"{kind}{count}d{rest}_backward"
            for kind, rest in (
                ("avg_pool", ""),
                ("_adaptive_avg_pool", ""),
                ("max_pool", "_with_indices"),
                ("reflection_pad", ""),
                ("replication_pad", ""),
            )
            for count in (2, 3)
        ],
        _pooling,
    ),
    "embedding_dense_backward": _embedding,
    "meshloom::convolution_input_gradient": partial(_convolution, of_weight=False),
    "meshloom::convolution_weight_gradient": partial(_convolution, of_weight=True),
    "index_put": _index_put,
    "diagonal_scatter": _diagonal_scatter,
}
