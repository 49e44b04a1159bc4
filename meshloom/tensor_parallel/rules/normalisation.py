"""Norms: the dims they average over stay whole; channels and groups may be cut."""

from __future__ import annotations

from typing import Any

from meshloom.tensor_parallel.rules.arguments import set_argument
from meshloom.tensor_parallel.rules.call import Call, Operand, Rule
from meshloom.tensor_parallel.rules.factors import Dims, Factors, Product, Sizes, Term


def _over_last(call: Call) -> Factors | None:
    """layer_norm, rms_norm: x [..., n], weight [n], bias [n]."""
    shape = call.operands[0].shape
    count = len(call.arguments["normalized_shape"])
    lead = len(shape) - count
    names: Dims = tuple(f"d{place}" if place < lead else None for place in range(len(shape)))
    others: tuple[Dims, ...] = tuple((None,) * len(each.shape) for each in call.operands[1:])
    return Factors(
        operands=(names, *others), outputs=(names,) * len(call.outputs),
        sizes={f"d{place}": shape[place] for place in range(lead)},
    )  # fmt: skip


def _over_batch(call: Call) -> Factors | None:
    """batch_norm: statistics over all but channels, dim 1. x [b, c, ...]; weight, bias, running statistics
    [c]."""
    x = call.operands[0]
    dims: list[Term] = [None] * len(x.shape)
    dims[1] = "c"
    if not call.arguments.get("training", True):
        dims = [f"d{place}" for place in range(len(x.shape))]
        dims[1] = "c"
    sizes = {f"d{place}": size for place, size in enumerate(x.shape)} | {"c": x.shape[1]}
    used = {term for term in dims if isinstance(term, str)}
    return Factors(
        operands=(tuple(dims), *(("c",) for _ in call.operands[1:])),
        outputs=(tuple(dims),) + (("c",),) * (len(call.outputs) - 1),
        sizes={name: size for name, size in sizes.items() if name in used},
        filled=frozenset({"c"}),
    )


def _instance_norm(call: Call) -> Factors | None:
    x = call.operands[0]
    if len(call.operands) > 1 and any(
        isinstance(call.arguments.get(name), Operand) for name in ("running_mean", "running_var")
    ):
        return None
    dims: Dims = ("b", "c", *(None,) * (len(x.shape) - 2))
    return Factors(
        operands=(dims, *(("c",) for _ in call.operands[1:])),
        outputs=(dims,),
        sizes={"b": x.shape[0], "c": x.shape[1]},
        filled=frozenset({"b", "c"}),
    )


def _group_norm(call: Call) -> Factors | None:
    """x [b, (g c), ...], weight and bias [(g c)]."""
    x = call.operands[0]
    groups: int = call.arguments["num_groups"]
    size = x.shape[1] // groups
    channels: Term = "g" if size == 1 else Product(("g", "c"))
    dims: Dims = ("b", channels, *(None,) * (len(x.shape) - 2))
    sizes = {"b": x.shape[0], "g": groups} | ({"c": size} if size != 1 else {})

    def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], here: Sizes) -> Any:
        return set_argument(target, args, kwargs, "num_groups", here.here["g"])

    return Factors(
        operands=(dims, *((channels,) for _ in call.operands[1:])), outputs=(dims,), sizes=sizes,
        whole=frozenset({"c"} if size != 1 else ()), filled=frozenset({"b", "g"}), local=local,
    )  # fmt: skip


def _vector_norm(call: Call) -> Factors | None:
    """linalg_vector_norm: the dims it is taken over stay whole."""
    shape = call.operands[0].shape
    dims = set(call.dims("dim", len(shape)))
    keep = bool(call.arguments.get("keepdim"))
    names: Dims = tuple(None if place in dims else f"d{place}" for place in range(len(shape)))
    return Factors(
        operands=(names,),
        outputs=(tuple(name for place, name in enumerate(names) if keep or place not in dims),),
        sizes={f"d{place}": shape[place] for place in range(len(shape)) if place not in dims},
    )


def _weight_norm(call: Call) -> Factors | None:
    """g v / |v|, the norm taken over all dims but one, which may be cut. v like the result, g 1 in every
    other dim."""
    v = call.operands[0]
    dim = call.dim("dim", len(v.shape))
    names: Dims = tuple("kept" if place == dim else None for place in range(len(v.shape)))
    return Factors(
        operands=(names, names), outputs=(names,) * len(call.outputs), sizes={"kept": v.shape[dim]}
    )


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
