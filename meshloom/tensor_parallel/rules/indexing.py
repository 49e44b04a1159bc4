"""Lookups of rows and elements: embedding, embedding_bag, gather, index, scatter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from meshloom.program.operators.embedding_bag import BagsOfPart
from meshloom.program.operators.experts import lookup_of_part
from meshloom.program.operators.partial import embedding_of_part
from meshloom.tensor_parallel.rules.factors import (
    FIRST_LINEAR,
    Dims,
    Factors,
    Routed,
    ShardSizes,
    Term,
    broadcast_dims,
    labels_of,
)
from meshloom.tensor_parallel.rules.operator_call import Call, Rule, TensorArgument, given_by_name, replicated


def _embedding(call: Call) -> Factors | None:
    """weight [v, d], index [i*] -> [i*, d]. A shard of v looks up the indices in it, and gives zeros for all
    others."""
    weight, index = call.operands[:2]
    names: Dims = tuple(f"i{place}" for place in range(len(index.shape)))
    padding: int = call.arguments.get("padding_idx", -1)
    scaled = bool(call.arguments.get("scale_grad_by_freq"))

    def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardSizes) -> Any:
        if shard.local["v"] == shard.full["v"]:
            return target, args, kwargs
        return embedding_of_part, (args[0], args[1], shard.starts["v"][shard.rank], padding), {}

    return Factors(
        operands=(("v", "d"), names),
        outputs=((*names, "d"),),
        sizes={"v": weight.shape[0], "d": weight.shape[1]}
        | {f"i{place}": size for place, size in enumerate(index.shape)},
        sums=frozenset({"v"}),
        unsharded=frozenset({"v"} | set(names) if scaled else ()),
        contiguous=frozenset({"v"}),
        linear=FIRST_LINEAR,
        local=local,
    )


def _gather(call: Call) -> Factors | None:
    x, index = call.operands[:2]
    ndim = len(x.shape)
    dim = call.dim("dim", ndim)
    names, sizes = _labels_beside(dim, x, index)
    out = (*names[:dim], "picked", *names[dim + 1 :])
    sizes["picked"] = index.shape[dim]
    return Factors(operands=(names, out), outputs=(out,), sizes=sizes, linear=FIRST_LINEAR)


def _labels_beside(dim: int, x: TensorArgument, index: TensorArgument) -> tuple[Dims, dict[str, int]]:
    """Labels of the dims, except `dim`, in which x and index have the same size."""
    differ = {place for place, size in enumerate(x.shape) if size != index.shape[place]}
    return labels_of(x.shape, differ | {dim})


def _index_select(call: Call) -> Factors | None:
    x = call.operands[0]
    dim = call.dim("dim", len(x.shape))
    names, sizes = labels_of(x.shape, {dim})
    out = (*names[:dim], "picked", *names[dim + 1 :])
    sizes["picked"] = call.outputs[0].shape[dim]
    return Factors(operands=(names, ("picked",)), outputs=(out,), sizes=sizes, linear=FIRST_LINEAR)


def _index(call: Call) -> Factors | None:
    """x[:, i, j]: indexed dims stay unsharded; the others may be sharded, and so may the dims of the
    indices."""
    x = call.operands[0]
    given: tuple[Any, ...] = call.arguments["indices"]
    found = [(place, each) for place, each in enumerate(given) if isinstance(each, TensorArgument)]
    if not found or any("bool" in str(each.meta.dtype) for _, each in found):
        return None
    places = [place for place, _ in found]
    shape = torch.broadcast_shapes(*(each.shape for _, each in found))
    index_names: Dims = tuple(f"i{place}" for place in range(len(shape)))
    rest: list[tuple[int, Term]] = [
        (place, f"d{place}") for place in range(len(x.shape)) if place not in places
    ]
    together = places == list(range(places[0], places[-1] + 1))
    before = [name for place, name in rest if together and place < places[0]]
    after = [name for place, name in rest if not (together and place < places[0])]
    names, sizes = labels_of(x.shape, places)
    operands: list[Dims] = [names]
    operands += [broadcast_dims(each.shape, index_names, shape) for _, each in found]
    sizes |= {f"i{place}": size for place, size in enumerate(shape)}
    out = (*before, *index_names, *after)
    factors = Factors(operands=tuple(operands), outputs=(out,), sizes=sizes, linear=FIRST_LINEAR)
    if places == [0] and len(shape) == 1 and len(x.shape) > 1:
        return _with_groups(factors, x.shape[0])
    return factors


def _with_groups(factors: Factors, num_groups: int) -> Factors:
    """x[i], an entry of x for every i: ranks may shard both, each with the rows that index its entries."""

    def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardSizes) -> Any:
        if not shard.is_sharded("e"):
            return target, args, kwargs
        return lookup_of_part, (args[0], args[1][0], shard.starts["e"][shard.rank], num_groups), {}

    table, *others = factors.operands
    return replace(
        factors, operands=(("e", *table[1:]), *others), sizes={**factors.sizes, "e": num_groups}, unsharded=frozenset({"e"}),
        routed=Routed(rows="i0", groups="e", table=0, by=1), local=local,
    )  # fmt: skip


def _scatter(call: Call) -> Factors | None:
    """scatter, scatter_add of x, index and source: `dim` stays unsharded."""
    x, index = call.operands[:2]
    ndim = len(x.shape)
    dim = call.dim("dim", ndim)
    if any(len(each.shape) != ndim for each in call.operands):
        return None
    names, sizes = _labels_beside(dim, x, index)
    if any(
        each.shape[place] != x.shape[place] for each in call.operands for place in range(ndim) if names[place]
    ):
        return None
    return Factors(operands=(names,) * len(call.operands), outputs=(names,), sizes=sizes)


def _index_add(call: Call) -> Factors | None:
    """index_add, index_copy: rows of source are added to the rows of x that index names; `dim` stays
    unsharded."""
    x, index, source = call.arguments["self"], call.arguments["index"], call.arguments["source"]
    if not x.shape or len(source.shape) != len(x.shape):
        return None
    dim = call.dim("dim", len(x.shape))
    names, sizes = labels_of(x.shape, {dim})
    rows: dict[int, Dims] = {x.number: names, index.number: (None,) * len(index.shape), source.number: names}
    return Factors(
        operands=tuple(rows[place] for place in range(3)), outputs=(names,), sizes=sizes, linear=(frozenset({x.number, source.number}),)
    )  # fmt: skip


def _one_hot(call: Call) -> Factors | None:
    names, sizes = labels_of(call.operands[0].shape)
    return Factors(operands=(names,), outputs=((*names, None),), sizes=sizes)


def _embedding_bag(call: Call) -> Factors | None:
    """weight [v, d] -> bags [b, d]. d may be sharded, and so may v except for maxima: rows of other shards
    add nothing to a sum."""
    weight = call.operands[0]
    mode, scaled, sparse = (call.arguments[name] for name in ("mode", "scale_grad_by_freq", "sparse"))
    given = call.arguments.get("padding_idx")
    padding = -1 if given is None else given % weight.shape[0] if given >= -weight.shape[0] else -1

    def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardSizes) -> Any:
        if shard.local["v"] == shard.full["v"]:
            return target, args, kwargs
        part = BagsOfPart(
            start=shard.starts["v"][shard.rank], num_rows=shard.full["v"], mode=mode, padding=padding, has_last=bool(call.arguments["include_last_offset"]),
            first=shard.rank == 0, shapes=shard.outputs[1:],
        )  # fmt: skip
        return part, (*args[:3], given_by_name(target, args, kwargs).get("per_sample_weights")), {}

    rest: tuple[Dims, ...] = tuple(
        (None, "d") if len(each.shape) == 2 else (None,) * len(each.shape) for each in call.outputs[1:]
    )
    return Factors(
        operands=(("v", "d"), *replicated(call.operands[1:])),
        outputs=((None, "d"), *rest),
        sizes={"v": weight.shape[0], "d": weight.shape[1]},
        sums=frozenset({"v"}),
        unsharded=frozenset({"v"} if mode == 2 or scaled or sparse else ()),
        contiguous=frozenset({"v"}),
        nonempty=frozenset({"d"}),
        local=local,
    )


def _masked_scatter(call: Call) -> Factors | None:
    """Elements of source, in order, where mask is set. Which element goes where depends on the full mask, so
    nothing is sharded."""
    operands = replicated(call.operands)
    moved = frozenset({call.arguments["self"].number, call.arguments["source"].number})
    return Factors(operands=operands, outputs=((None,) * len(call.outputs[0].shape),), linear=(moved,))


INDEXING: dict[str, Rule] = {
    "embedding": _embedding,
    "gather": _gather,
    "index_select": _index_select,
    "index": _index,
    "scatter": _scatter,
    "scatter_add": _scatter,
    "index_add": _index_add,
    "index_copy": _index_add,
    "one_hot": _one_hot,
    "embedding_bag": _embedding_bag,
    "masked_scatter": _masked_scatter,
}
