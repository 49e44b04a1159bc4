"""Attention: heads, batch and query positions may be sharded; key positions and head size stay unsharded."""

from __future__ import annotations

import math

from meshloom.tensor_parallel.rules.factors import Dims, Factors, Product, Term, labels_in
from meshloom.tensor_parallel.rules.operator_call import Call, Rule, TensorArgument


def _attention(call: Call) -> Factors | None:
    """q [b*, h, sq, e], k [b*, h, sk, e], v [b*, h, sk, v], mask broadcast to [b*, h, sq, sk] -> [b*, h, sq,
    v].

    With `enable_gqa`, k and v have fewer heads: h is then (kv heads x queries per head).
    """
    q, k, v = call.operands[:3]
    if len(q.shape) < 3:
        return None
    batch: list[Term] = [f"b{place}" for place in range(len(q.shape) - 3)]
    heads: Term = "h"
    sizes = {f"b{place}": size for place, size in enumerate(q.shape[:-3])}
    sizes |= {"h": k.shape[-3], "sq": q.shape[-2], "v": v.shape[-1]}
    if q.shape[-3] != k.shape[-3]:
        heads, sizes["r"] = Product(("h", "r")), q.shape[-3] // k.shape[-3]
    causal = bool(call.arguments.get("is_causal"))
    mask = call.arguments.get("attn_mask")
    operands: list[Dims] = [
        _broadcast((*batch, heads, "sq", None), q, sizes),
        _broadcast((*batch, "h", None, None), k, sizes),
        _broadcast((*batch, "h", None, "v"), v, sizes),
    ]
    if isinstance(mask, TensorArgument):
        full: Dims = (*batch, heads, "sq", None)
        operands.append(_broadcast(full[len(full) - len(mask.shape) :], mask, sizes))
    rate = call.arguments.get("dropout_p") or 0.0
    return Factors(
        operands=tuple(operands),
        outputs=((*batch, heads, "sq", "v"),),
        sizes=sizes,
        unsharded=frozenset({"sq"} if causal else ()) | frozenset({"v"} if rate else ()),
        drawn=(*batch, heads, "sq", None) if rate else (),
    )


def _broadcast(dims: Dims, operand: TensorArgument, sizes: dict[str, int]) -> Dims:
    return tuple(
        None if term is not None and operand.shape[place] == 1 and _size(term, sizes) != 1 else term
        for place, term in enumerate(dims)
    )


def _size(term: Term, sizes: dict[str, int]) -> int:
    return math.prod(sizes[label] for label in labels_in(term))


ATTENTION: dict[str, Rule] = {"scaled_dot_product_attention": _attention}
