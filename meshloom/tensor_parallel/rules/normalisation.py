"""Normalisation: normalised dims stay unsharded; channels and groups may be sharded."""

from __future__ import annotations

from typing import Any

from meshloom.tensor_parallel.rules.factors import Dims, Factors, Product, ShardSizes, Term, labels_of
from meshloom.tensor_parallel.rules.operator_call import Call, Rule, TensorArgument, replicated, set_argument


def _over_last(call: Call) -> Factors | None:
    """layer_norm, rms_norm: x [..., n], weight [n], bias [n]."""
    shape = call.operands[0].shape
    count = len(call.arguments["normalized_shape"])
    names, sizes = labels_of(shape, range(len(shape) - count, len(shape)))
    others = replicated(call.operands[1:])
    return Factors(operands=(names, *others), outputs=(names,) * len(call.outputs), sizes=sizes)


def _over_batch(call: Call) -> Factors | None:
    """batch_norm: statistics over all dims but the channels, dim 1. x [b, c, ...]; weight, bias, running
    statistics [c]."""
    x = call.operands[0]
    is_training = call.arguments.get("training", True)
    names, sizes = labels_of(x.shape, range(len(x.shape)) if is_training else (1,))
    dims: Dims = (names[0], "c", *names[2:])
    return Factors(
        operands=(dims, *(("c",) for _ in call.operands[1:])),
        outputs=(dims,) + (("c",),) * (len(call.outputs) - 1),
        sizes={**sizes, "c": x.shape[1]},
        nonempty=frozenset({"c"}),
    )


def _instance_norm(call: Call) -> Factors | None:
    x = call.operands[0]
    running = (call.arguments.get("running_mean"), call.arguments.get("running_var"))
    if any(isinstance(each, TensorArgument) for each in running):
        return None
    dims: Dims = ("b", "c", *(None,) * (len(x.shape) - 2))
    operands = (dims, *(("c",) for _ in call.operands[1:]))
    sizes = {"b": x.shape[0], "c": x.shape[1]}
    return Factors(operands=operands, outputs=(dims,), sizes=sizes, nonempty=frozenset({"b", "c"}))


def _group_norm(call: Call) -> Factors | None:
    """x [b, (g c), ...], weight and bias [(g c)]."""
    x = call.operands[0]
    groups: int = call.arguments["num_groups"]
    size = x.shape[1] // groups
    channels: Term = "g" if size == 1 else Product(("g", "c"))
    dims: Dims = ("b", channels, *(None,) * (len(x.shape) - 2))
    sizes = {"b": x.shape[0], "g": groups} | ({"c": size} if size != 1 else {})

    def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardSizes) -> Any:
        return set_argument(target, args, kwargs, "num_groups", shard.local["g"])

    return Factors(
        operands=(dims, *((channels,) for _ in call.operands[1:])), outputs=(dims,), sizes=sizes,
        unsharded=frozenset({"c"} if size != 1 else ()), nonempty=frozenset({"b", "g"}), local=local,
    )  # fmt: skip


def _vector_norm(call: Call) -> Factors | None:
    """linalg_vector_norm: the reduced dims stay unsharded."""
    shape = call.operands[0].shape
    dims = set(call.dims("dim", len(shape)))
    keep = bool(call.arguments.get("keepdim"))
    names, sizes = labels_of(shape, dims)
    out = tuple(name for place, name in enumerate(names) if keep or place not in dims)
    return Factors(operands=(names,), outputs=(out,), sizes=sizes)


def _weight_norm(call: Call) -> Factors | None:
    """g v / |v|, with the norm over all dims but one, which may be sharded. v has the result's shape; g has
    size 1 in all other dims."""
    v = call.operands[0]
    dim = call.dim("dim", len(v.shape))
    names, sizes = labels_of(v.shape, but=set(range(len(v.shape))) - {dim})
    return Factors(operands=(names, names), outputs=(names,) * len(call.outputs), sizes=sizes)


NORMALISATION: dict[str, Rule] = {
    "layer_norm": _over_last,
    "native_layer_norm": _over_last,
    "rms_norm": _over_last,
    "_fused_rms_norm": _over_last,
    "batch_norm": _over_batch,
    "native_batch_norm": _over_batch,
    "instance_norm": _instance_norm,
    "group_norm": _group_norm,
    "linalg_vector_norm": _vector_norm,
    "_weight_norm": _weight_norm,
}
