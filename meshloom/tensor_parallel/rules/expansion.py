"""Dims that grow: expand, repeat, pad."""

from __future__ import annotations

from typing import Any

from meshloom.tensor_parallel.rules.factors import (
    FIRST_LINEAR,
    Concat,
    Factors,
    Product,
    ShardSizes,
    Term,
    broadcast_dims,
    labels_of,
)
from meshloom.tensor_parallel.rules.operator_call import Call, Rule, replicated, set_argument, to_output_shape
from meshloom.tensor_parallel.rules.reshapes import as_other


def _expand(call: Call) -> Factors | None:
    before, after = call.operands[0].shape, call.outputs[0].shape
    names, sizes = labels_of(after)
    operands = (broadcast_dims(before, names, after), *replicated(call.operands[1:]))
    local = to_output_shape("size") if call.name == "expand" else None
    return Factors(operands=operands, outputs=(names,), sizes=sizes, linear=FIRST_LINEAR, local=local)


def _broadcast_tensors(call: Call) -> Factors | None:
    """Every tensor broadcast to their common shape."""
    full = call.outputs[0].shape
    names, sizes = labels_of(full)
    if len(call.outputs) != len(call.operands):
        return None
    operands = tuple(broadcast_dims(each.shape, names, full) for each in call.operands)
    linear = (frozenset(range(len(operands))),)
    return Factors(operands=operands, outputs=(names,) * len(operands), sizes=sizes, linear=linear)


def _repeat(call: Call) -> Factors | None:
    names, sizes = labels_of(call.operands[0].shape)
    repeats: tuple[int, ...] = call.arguments["repeats"]
    lead = len(repeats) - len(names)
    out: list[Term] = []
    for place, count in enumerate(repeats):
        label = f"t{place}"
        sizes[label] = count
        if place < lead:
            out.append(label)
        else:
            name = names[place - lead]
            out.append(name if count == 1 else Product((label, name)))

    def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardSizes) -> Any:
        return set_argument(
            target, args, kwargs, "repeats", tuple(shard.local[f"t{place}"] for place in range(len(repeats)))
        )

    return Factors(operands=(names,), outputs=(tuple(out),), sizes=sizes, linear=FIRST_LINEAR, local=local)


def _repeat_interleave(call: Call) -> Factors | None:
    """Each index of a dim, or each element of the flattened tensor, several times in a row."""
    if not isinstance(call.arguments.get("repeats"), int):
        return None
    names, sizes = labels_of(call.operands[0].shape)
    sizes["repeats"] = call.arguments["repeats"]
    out: list[Term] = list(names)
    if call.arguments.get("dim") is None:
        out = [Product((*names, "repeats"))]
    else:
        dim = call.dim("dim", len(names))
        out[dim] = Product((f"d{dim}", "repeats"))

    def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardSizes) -> Any:
        others = {key: each for key, each in kwargs.items() if key != "output_size"}
        return set_argument(target, args, others, "repeats", shard.local["repeats"])

    return Factors(operands=(names,), outputs=(tuple(out),), sizes=sizes, linear=FIRST_LINEAR, local=local)


def _pad(call: Call) -> Factors | None:
    """A padded dim is before | kept | after; only `kept` may be sharded."""
    pad: tuple[int, ...] = call.arguments["pad"]
    if call.name == "pad" and call.arguments.get("mode", "constant") != "constant":
        count = len(pad) // 2
        shape = call.operands[0].shape
        kept, sizes = labels_of(shape, range(len(shape) - count, len(shape)))
        return Factors(operands=(kept,), outputs=(kept,), sizes=sizes, linear=FIRST_LINEAR)
    names, sizes = labels_of(call.operands[0].shape)
    out: list[Term] = list(names)
    operand: list[Term] = list(names)
    whole: set[str] = set()
    for number in range(len(pad) // 2):
        before, after = pad[2 * number : 2 * number + 2]
        dim = len(names) - 1 - number
        if before < 0 or after < 0:
            operand[dim] = out[dim] = None
            sizes.pop(f"d{dim}")
        elif before or after:
            parts: list[Term] = [f"f{dim}"] * bool(before) + [names[dim]] + [f"a{dim}"] * bool(after)
            sizes.update({f"f{dim}": before, f"a{dim}": after})
            whole |= {f"f{dim}", f"a{dim}"}
            out[dim] = Concat(tuple(parts))
    return Factors(
        operands=(tuple(operand),), outputs=(tuple(out),), sizes=sizes, unsharded=frozenset(whole),
        linear=FIRST_LINEAR if not call.arguments.get("value") else (),
    )  # fmt: skip


EXPANSION: dict[str, Rule] = {
    "expand": _expand,
    "expand_as": as_other("expand", _expand),
    "broadcast_tensors": _broadcast_tensors,
    "repeat": _repeat,
    "repeat_interleave": _repeat_interleave,
    "constant_pad_nd": _pad,
    "pad": _pad,
}
