"""Reductions and scans along dims: sums, means, extrema, softmax, sorting; losses of elements."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from meshloom.program.operators.log_softmax import LogSoftmaxOfPart
from meshloom.program.operators.partial import loss_of_part, mean_of_part
from meshloom.tensor_parallel.rules.elementwise import elementwise
from meshloom.tensor_parallel.rules.factors import (
    FIRST_LINEAR,
    Concat,
    Factors,
    InnerCollective,
    ShardSizes,
    labels_of,
)
from meshloom.tensor_parallel.rules.operator_call import Call, Rule, TensorArgument, replicated


def _reduced(call: Call, *, sums: bool, local: Any = None) -> Factors | None:
    shape = call.operands[0].shape
    ndim = len(shape)
    dims = set(call.dims("dim", ndim))
    keep = bool(call.arguments.get("keepdim", False))
    names, sizes = labels_of(shape)
    out = tuple(
        None if place in dims else name for place, name in enumerate(names) if keep or place not in dims
    )
    reduced = frozenset(f"d{place}" for place in dims)
    same = call.operands[0].meta.dtype == call.outputs[0].dtype
    return Factors(
        operands=(names, *replicated(call.operands[1:])),
        outputs=(out,) * len(call.outputs),
        sizes=sizes,
        sums=reduced if sums else frozenset(),
        unsharded=frozenset() if sums else reduced,
        linear=FIRST_LINEAR if sums and same else (),
        local=local,
    )


def _mean(call: Call) -> Factors | None:
    ndim = len(call.operands[0].shape)
    dims = call.dims("dim", ndim)
    keep = bool(call.arguments.get("keepdim", False))
    count = math.prod(call.operands[0].shape[dim] for dim in dims)

    def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardSizes) -> Any:
        if all(shard.local[f"d{dim}"] == shard.full[f"d{dim}"] for dim in dims):
            return target, args, kwargs
        return mean_of_part, (args[0], dims, keep, count, call.arguments.get("dtype")), {}

    return _reduced(call, sums=True, local=local)


def _unsharded(call: Call) -> Factors | None:
    if "other" in call.arguments:  # max(a, b), min(a, b)
        return elementwise(call)
    return _reduced(call, sums=False)


def _along(*names: str) -> Rule:
    """softmax, cumsum, sort, topk: the shape stays the same; the dims in these arguments stay unsharded."""

    def rule(call: Call) -> Factors | None:
        shape = call.operands[0].shape
        found = {dim for name in names for dim in call.dims(name, len(shape))}
        dims, sizes = labels_of(shape, found)
        is_linear = call.name == "cumsum" and call.operands[0].meta.dtype == call.outputs[0].dtype
        operands = (dims, *replicated(call.operands[1:]))
        outputs = (dims,) * len(call.outputs)
        return Factors(
            operands=operands, outputs=outputs, sizes=sizes, linear=FIRST_LINEAR if is_linear else ()
        )

    return rule


def _pointwise_loss(call: Call) -> Factors | None:
    """mse_loss, l1_loss, ...: the mean or sum of the losses of all elements; every dim may be sharded."""
    one, other = call.operands[0].shape, call.operands[1].shape
    if one != other or len(call.operands) != 2:
        return None
    names, sizes = labels_of(one)
    reduction = call.arguments["reduction"]
    if reduction == 0:
        return Factors(operands=(names, names), outputs=(names,), sizes=sizes)

    def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardSizes) -> Any:
        if shard.local == shard.full or reduction == 2:
            return target, args, kwargs
        settings = {
            name: value
            for name, value in call.arguments.items()
            if not isinstance(value, TensorArgument) and name != "reduction" and value is not None
        }  # beta, delta
        return loss_of_part, (target, *args[:2], math.prod(one), settings), {}

    return Factors(operands=(names, names), outputs=((),), sizes=sizes, sums=frozenset(sizes), local=local)


def _glu(call: Call) -> Factors | None:
    """glu: a dim consists of two halves, one of which gates the other."""
    shape = call.operands[0].shape
    dim = call.dim("dim", len(shape))
    names, sizes = labels_of(shape)
    del sizes[f"d{dim}"]
    sizes |= {"one": shape[dim] // 2, "other": shape[dim] // 2}
    operand = (*names[:dim], Concat(("one", "other")), *names[dim + 1 :])
    out = (*names[:dim], "one", *names[dim + 1 :])
    return Factors(operands=(operand,), outputs=(out,), sizes=sizes, unsharded=frozenset({"one", "other"}))


def _log_softmax(call: Call) -> Factors | None:
    """log_softmax: every dim may be sharded; along the reduced one it takes two small all-reduces."""
    x = call.operands[0]
    if not x.shape:
        return None
    names, sizes = labels_of(x.shape)
    dim = call.dim("dim", len(x.shape))
    label = f"d{dim}"
    plain = call.outputs[0].dtype == x.meta.dtype and not call.node.context.autocast
    rows = math.prod(x.shape) // max(x.shape[dim], 1)

    def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardSizes) -> Any:
        return (
            (LogSoftmaxOfPart(dim=dim), (args[0],), {}) if shard.is_sharded(label) else (target, args, kwargs)
        )

    return Factors(
        operands=(names,), outputs=(names,), sizes=sizes, unsharded=frozenset(() if plain else {label}),
        collectives={label: (
            InnerCollective(collective="all_reduce", num_elements=rows, times=2),
            InnerCollective(collective="all_reduce", num_elements=rows, times=1, backward=True),
        )},
        local=local,
    )  # fmt: skip


REDUCTIONS: dict[str, Rule] = {
    "log_softmax": _log_softmax,
    "_log_softmax": _log_softmax,
    "sum": partial(_reduced, sums=True),
    "mean": _mean,
    "glu": _glu,
    **dict.fromkeys(
        (
            "max", "min", "amax", "amin", "argmax", "argmin", "median", "any", "all", "count_nonzero",
            "prod", "var", "std", "var_mean", "logsumexp", "norm",
        ),
        _unsharded,
    ),
    **dict.fromkeys(
        ("softmax", "_softmax", "cumsum", "cumprod", "logcumsumexp", "sort", "topk", "argsort"),
        _along("dim"),
    ),
    **dict.fromkeys(
        (
            "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits",
            "soft_margin_loss",
        ),
        _pointwise_loss,
    ),
}  # fmt: skip
