"""Dims split into consecutive ranges, and concatenated: split, slice, select, cat, stack."""

from __future__ import annotations

from typing import Any

import torch

from meshloom.tensor_parallel.rules.factors import (
    FIRST_LINEAR,
    Concat,
    Dims,
    Factors,
    LocalCall,
    Product,
    ShardSizes,
    Term,
    labels_of,
)
from meshloom.tensor_parallel.rules.operator_call import Call, Rule


def _without_dim(call: Call) -> Factors | None:
    """select, unbind: the dim that disappears stays unsharded."""
    names, sizes = labels_of(call.operands[0].shape)
    dim = call.dim("dim", len(names))
    outputs = (names[:dim] + names[dim + 1 :],) * len(call.outputs)
    whole = frozenset({f"d{dim}"})
    return Factors(operands=(names,), outputs=outputs, sizes=sizes, unsharded=whole, linear=FIRST_LINEAR)


def _split(call: Call) -> Factors | None:
    """chunk, split, split_with_sizes, tensor_split: a dim is a concatenation of the results' dims."""
    names, sizes = labels_of(call.operands[0].shape)
    dim = call.dim("dim", len(names))
    parts = [f"s{place}" for place in range(len(call.outputs))]
    sizes.update({part: output.shape[dim] for part, output in zip(parts, call.outputs, strict=True)})
    whole = Concat(tuple(parts)) if len(parts) > 1 else parts[0]
    sizes.pop(f"d{dim}")
    operand, *outputs = ((*names[:dim], part, *names[dim + 1 :]) for part in (whole, *parts))

    def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardSizes) -> Any:
        if all(shard.local[part] == shard.full[part] for part in parts):
            return target, args, kwargs
        local_sizes = tuple(shard.local[part] for part in parts)
        return torch.ops.aten.split_with_sizes.default, (args[0], local_sizes, dim), {}

    return Factors(operands=(operand,), outputs=tuple(outputs), sizes=sizes, linear=FIRST_LINEAR, local=local)


def _slice(call: Call) -> Factors | None:
    """x[..., start:end]: the middle of before | kept | after."""
    shape, out = call.operands[0].shape, call.outputs[0].shape
    names, sizes = labels_of(shape)
    dim = call.dim("dim", len(names))
    step = call.arguments.get("step", 1) if call.name == "slice" else 1
    kept = out[dim]
    if kept == shape[dim]:
        every = _all_of(dim)
        return Factors(operands=(names,), outputs=(names,), sizes=sizes, linear=FIRST_LINEAR, local=every)
    start: Any = call.arguments.get("start") or 0
    if not isinstance(start, int):
        return None
    start = max(start + shape[dim], 0) if start < 0 else min(start, shape[dim])
    sizes.pop(f"d{dim}")

    def factors(sliced: Term, *unsharded: str, local: LocalCall | None = None) -> Factors:
        operand, result = ((*names[:dim], term, *names[dim + 1 :]) for term in (sliced, "kept"))
        return Factors(
            operands=(operand,), outputs=(result,), sizes=sizes, unsharded=frozenset(unsharded), linear=FIRST_LINEAR, local=local
        )  # fmt: skip

    if step != 1:
        sizes["kept"] = kept
        if shape[dim] != kept * step or start >= step:
            return factors(None, "kept")
        sizes["step"] = step
        return factors(Product(("kept", "step")), "step")
    parts = {"before": start, "kept": kept, "after": shape[dim] - start - kept}
    sizes.update(parts)

    def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardSizes) -> Any:
        if all(shard.local[part] == shard.full[part] for part in parts):
            return target, args, kwargs
        begin = shard.local["before"]
        return torch.ops.aten.slice.Tensor, (args[0], dim, begin, begin + shard.local["kept"]), {}

    return factors(Concat(tuple(part for part, size in parts.items() if size or part == "kept")), local=local)


def _all_of(dim: int) -> Any:
    """A `LocalCall` that slices all indices of a local dim."""

    def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardSizes) -> Any:
        return torch.ops.aten.slice.Tensor, (args[0], dim, 0, None), {}

    return local


def _cat(call: Call) -> Factors | None:
    ndim = len(call.outputs[0].shape)
    if any(len(each.shape) != ndim for each in call.operands):  # torch accepts empty tensors of other shapes
        return None
    dim = call.dim("dim", ndim)
    names, sizes = labels_of(call.outputs[0].shape)
    sizes.pop(f"d{dim}")
    parts = {f"c{place}": each.shape[dim] for place, each in enumerate(call.operands)}
    whole = Concat(tuple(parts)) if len(parts) > 1 else "c0"
    out, *operands = ((*names[:dim], part, *names[dim + 1 :]) for part in (whole, *parts))
    linear = (frozenset(range(len(parts))),)
    return Factors(operands=tuple(operands), outputs=(out,), sizes=sizes | parts, linear=linear)


def _stack(call: Call) -> Factors | None:
    names, sizes = labels_of(call.operands[0].shape)
    dim = call.dim("dim", len(names) + 1)
    return Factors(
        operands=(names,) * len(call.operands),
        outputs=((*names[:dim], None, *names[dim:]),),
        sizes=sizes,
        linear=(frozenset(range(len(call.operands))),),
    )


def _scatter_into(call: Call) -> Factors | None:
    """slice_scatter, select_scatter: the dim that is written stays unsharded."""
    names, sizes = labels_of(call.operands[0].shape)
    dim = call.dim("dim", len(names))
    source = call.operands[1]
    written: Dims = ()
    if call.name == "slice_scatter":
        written = (names[dim] if source.shape[dim] == call.operands[0].shape[dim] else None,)
    rows = (*names[:dim], *written, *names[dim + 1 :])
    return Factors(
        operands=(names, rows), outputs=(names,), sizes=sizes, unsharded=frozenset({f"d{dim}"}), linear=(frozenset({0, 1}),)
    )  # fmt: skip


def _diagonal(call: Call) -> Factors | None:
    names, sizes = labels_of(call.operands[0].shape)
    one, other = call.dim("dim1", len(names)), call.dim("dim2", len(names))
    out = (*(name for place, name in enumerate(names) if place not in (one, other)), None)
    whole = frozenset({f"d{one}", f"d{other}"})
    return Factors(operands=(names,), outputs=(out,), sizes=sizes, unsharded=whole, linear=FIRST_LINEAR)


SLICES: dict[str, Rule] = {
    "select": _without_dim,
    "unbind": _without_dim,
    "split": _split,
    "split_with_sizes": _split,
    "chunk": _split,
    "tensor_split": _split,
    "slice": _slice,
    "narrow": _slice,
    "cat": _cat,
    "concat": _cat,
    "stack": _stack,
    "slice_scatter": _scatter_into,
    "select_scatter": _scatter_into,
    "diagonal": _diagonal,
}
