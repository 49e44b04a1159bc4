"""Dims split into consecutive ranges, and concatenated: split, slice, select, cat, stack."""

from __future__ import annotations

from typing import Any

import torch

from meshloom.tensor_parallel.rules.call import Call, Rule
from meshloom.tensor_parallel.rules.factors import (
    FIRST_LINEAR,
    Concat,
    Dims,
    Factors,
    Product,
    ShardSizes,
    Term,
    labels_of,
)


def _without_dim(call: Call) -> Factors | None:
    """select, unbind: the dim that disappears stays unsharded."""
    names, sizes = labels_of(call.operands[0].shape)
    dim = call.dim("dim", len(names))
    out = tuple(names[:dim] + names[dim + 1 :])
    return Factors(
        operands=(tuple(names),),
        outputs=(out,) * len(call.outputs),
        sizes=sizes,
        unsharded=frozenset({f"d{dim}"}),
        linear=FIRST_LINEAR,
    )


def _split(call: Call) -> Factors | None:
    """chunk, split, split_with_sizes, tensor_split: a dim is a concatenation of the results' dims."""
    names, sizes = labels_of(call.operands[0].shape)
    dim = call.dim("dim", len(names))
    parts = [f"s{place}" for place in range(len(call.outputs))]
    sizes.update({part: output.shape[dim] for part, output in zip(parts, call.outputs, strict=True)})
    operand: list[Term] = list(names)
    operand[dim] = Concat(tuple(parts)) if len(parts) > 1 else parts[0]
    sizes.pop(f"d{dim}")
    outputs: tuple[Dims, ...] = tuple(
        tuple(part if place == dim else name for place, name in enumerate(names)) for part in parts
    )

    def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardSizes) -> Any:
        if all(shard.local[part] == shard.full[part] for part in parts):
            return target, args, kwargs
        return (
            torch.ops.aten.split_with_sizes.default,
            (args[0], tuple(shard.local[part] for part in parts), dim),
            {},
        )

    return Factors(operands=(tuple(operand),), outputs=outputs, sizes=sizes, linear=FIRST_LINEAR, local=local)


def _slice(call: Call) -> Factors | None:
    """x[..., start:end]: the middle of before | kept | after."""
    shape, out = call.operands[0].shape, call.outputs[0].shape
    names, sizes = labels_of(shape)
    dim = call.dim("dim", len(names))
    step = call.arguments.get("step", 1) if call.name == "slice" else 1
    kept = out[dim]
    result: list[Term] = list(names)
    operand: list[Term] = list(names)
    if kept == shape[dim]:
        return Factors(
            operands=(tuple(operand),),
            outputs=(tuple(result),),
            sizes=sizes,
            linear=FIRST_LINEAR,
            local=_all_of(dim),
        )
    start: Any = call.arguments.get("start") or 0
    if not isinstance(start, int):
        return None
    start = max(start + shape[dim], 0) if start < 0 else min(start, shape[dim])
    result[dim] = "kept"
    sizes.pop(f"d{dim}")
    if step != 1:
        sizes["kept"] = kept
        if shape[dim] != kept * step or start >= step:
            operand[dim] = None
            return Factors(
                operands=(tuple(operand),),
                outputs=(tuple(result),),
                sizes=sizes,
                unsharded=frozenset({"kept"}),
                linear=FIRST_LINEAR,
            )
        sizes["step"] = step
        operand[dim] = Product(("kept", "step"))
        return Factors(
            operands=(tuple(operand),),
            outputs=(tuple(result),),
            sizes=sizes,
            unsharded=frozenset({"step"}),
            linear=FIRST_LINEAR,
        )
    parts = {"before": start, "kept": kept, "after": shape[dim] - start - kept}
    sizes.update(parts)
    operand[dim] = Concat(tuple(part for part, size in parts.items() if size or part == "kept"))

    def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardSizes) -> Any:
        if all(shard.local[part] == shard.full[part] for part in parts):
            return target, args, kwargs
        begin = shard.local["before"]
        return torch.ops.aten.slice.Tensor, (args[0], dim, begin, begin + shard.local["kept"]), {}

    return Factors(
        operands=(tuple(operand),), outputs=(tuple(result),), sizes=sizes, linear=FIRST_LINEAR, local=local
    )


def _all_of(dim: int) -> Any:
    """A `LocalCall` that slices all indices of a local dim."""

    def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardSizes) -> Any:
        return torch.ops.aten.slice.Tensor, (args[0], dim, 0, None), {}

    return local


def _cat(call: Call) -> Factors | None:
    ndim = len(call.outputs[0].shape)
    operands = [each for each in call.operands if len(each.shape) == ndim]
    if len(operands) != len(call.operands):  # torch accepts empty tensors of other shapes
        return None
    dim = call.dim("dim", ndim)
    names, sizes = labels_of(call.outputs[0].shape)
    sizes.pop(f"d{dim}")
    sizes.update({f"c{place}": each.shape[dim] for place, each in enumerate(operands)})
    rows: list[Dims] = [
        tuple(f"c{place}" if each == dim else name for each, name in enumerate(names))
        for place in range(len(operands))
    ]
    out: list[Term] = list(names)
    out[dim] = Concat(tuple(f"c{place}" for place in range(len(operands)))) if len(operands) > 1 else "c0"
    return Factors(
        operands=tuple(rows), outputs=(tuple(out),), sizes=sizes, linear=(frozenset(range(len(operands))),)
    )


def _stack(call: Call) -> Factors | None:
    names, sizes = labels_of(call.operands[0].shape)
    dim = call.dim("dim", len(names) + 1)
    return Factors(
        operands=(tuple(names),) * len(call.operands),
        outputs=((*names[:dim], None, *names[dim:]),),
        sizes=sizes,
        linear=(frozenset(range(len(call.operands))),),
    )


def _scatter_into(call: Call) -> Factors | None:
    """slice_scatter, select_scatter: the dim that is written stays unsharded."""
    names, sizes = labels_of(call.operands[0].shape)
    dim = call.dim("dim", len(names))
    source = call.operands[1]
    rows: list[Term] = list(names) if call.name == "slice_scatter" else names[:dim] + names[dim + 1 :]
    if call.name == "slice_scatter" and source.shape[dim] != call.operands[0].shape[dim]:
        rows[dim] = None
    return Factors(
        operands=(tuple(names), tuple(rows)),
        outputs=(tuple(names),),
        sizes=sizes,
        unsharded=frozenset({f"d{dim}"}),
        linear=(frozenset({0, 1}),),
    )


def _diagonal(call: Call) -> Factors | None:
    names, sizes = labels_of(call.operands[0].shape)
    one, other = call.dim("dim1", len(names)), call.dim("dim2", len(names))
    rest = [name for place, name in enumerate(names) if place not in (one, other)]
    return Factors(
        operands=(tuple(names),),
        outputs=((*rest, None),),
        sizes=sizes,
        unsharded=frozenset({f"d{one}", f"d{other}"}),
        linear=FIRST_LINEAR,
    )


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
