"""Matrix products and convolutions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshloom.program.operators.experts import grouped_product_of_groups
from meshloom.program.operators.partial import convolution_of_nothing, grouped_product_of_part
from meshloom.tensor_parallel.rules.factors import (
    Dims,
    Factors,
    Product,
    Routed,
    ShardSizes,
    broadcast_dims,
    factors_of_text,
)
from meshloom.tensor_parallel.rules.operator_call import (
    Call,
    Rule,
    TensorArgument,
    given_by_name,
    set_argument,
    tensor_arguments,
)


def text(pattern: str) -> Rule:
    """A rule with one factor map for all arguments."""
    return lambda call: factors_of_text(pattern, list(tensor_arguments(call)), len(call.outputs))


def _of_operands(pattern: str, call: Call) -> Factors:
    """The factor map of a call with one result, of which every tensor argument is given."""
    return factors_of_text(pattern, [each.shape for each in call.operands], 1)


def _matmul(call: Call) -> Factors | None:
    one, other = len(call.operands[0].shape), len(call.operands[1].shape)
    left = "k" if one == 1 else "b* n k"
    right = "k" if other == 1 else ("k m" if other == 2 else "b* k m")
    left = "b* k" if other == 1 and one > 1 else left
    out = {"k": "", "b* k": "b*"}.get(left, "b* n") + ("" if other == 1 else " m")
    if one == 1 and other > 2:
        out = "b* m"
    return _of_operands(f"{left}, {right} -> {out}; sum k; linear 0 1", call)


def _addmm(call: Call) -> Factors | None:
    if call.arguments["beta"] != 1:
        return None
    bias = call.operands[0].shape
    pattern = "n m" if len(bias) == 2 else "m"
    return _of_operands(f"{pattern}, n k, k m -> n m; sum k; add 0; linear 0+1 0+2", call)


def _baddbmm(call: Call) -> Factors | None:
    if call.arguments["beta"] != 1:
        return None
    bias = " ".join("bnm"[3 - len(call.operands[0].shape) :])
    return _of_operands(f"{bias}, b n k, b k m -> b n m; sum k; add 0; linear 0+1 0+2", call)


def _convolution(call: Call) -> Factors | None:
    """x [b, g*i, space], w [g*o, i, space] -> [b, g*o, space]; transposed: w [g*i, o, space]. With one group,
    i is summed."""
    x, weight = call.operands[0], call.operands[1]
    groups: int = call.arguments["groups"]
    transposed = "transpose" in call.name or bool(call.arguments.get("transposed"))
    space: Dims = (None,) * (len(weight.shape) - 2)
    in_channels, out_channels = weight.shape[1] * groups, weight.shape[0]
    if transposed:
        in_channels, out_channels = weight.shape[0], weight.shape[1] * groups
    sizes: dict[str, int] = {"g": groups, "i": in_channels // groups, "o": out_channels // groups}
    full_in = _channels("i", groups, sizes)
    full_out = _channels("o", groups, sizes)
    operands: list[Dims] = [
        ("b", full_in, *space),
        (full_in, "o", *space) if transposed else (full_out, "i", *space),
    ]
    batched = len(x.shape) == len(weight.shape)
    if not batched:
        operands[0] = operands[0][1:]
    else:
        sizes["b"] = x.shape[0]
    added = isinstance(call.arguments.get("bias"), TensorArgument)
    if added:
        operands.append((full_out,))
    out: Dims = ("b", full_out, *space)
    bias = frozenset({2} if added else ())
    return Factors(
        operands=tuple(operands),
        outputs=(out if batched else out[1:],),
        sizes=sizes,
        sums=frozenset({"i"}) if groups == 1 else frozenset(),
        unsharded=frozenset() if groups == 1 else frozenset({"i", "o"}),
        added=bias,
        nonempty=frozenset({"g"}),
        linear=(frozenset({0}) | bias, frozenset({1}) | bias),
        local=_with_groups,
    )


def _channels(label: str, groups: int, sizes: Mapping[str, int]) -> Any:
    if groups == 1:
        return label
    return "g" if sizes[label] == 1 else Product(("g", label))


def _with_groups(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardSizes) -> Any:
    """The convolution of the local groups; kernels refuse empty channels."""
    groups = shard.local["g"]
    if not shard.local["i"] or not shard.local["o"]:
        operands = (*args[:3], *(None,) * (3 - len(args[:3])))
        return convolution_of_nothing, (*operands, tuple(shard.outputs[0]), target, *args[3:]), {}
    if groups == shard.full["g"]:
        return target, args, kwargs
    return set_argument(target, args, kwargs, "groups", groups)


def _einsum(call: Call) -> Factors | None:
    equation = str(call.arguments["equation"]).replace(" ", "")
    if "." in equation or "->" not in equation:
        return None
    left, right = equation.split("->")
    terms = left.split(",")
    if any(len(set(term)) != len(term) for term in (*terms, right)):
        return None
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, call.operands, strict=True):
        for letter, size in zip(term, operand.shape, strict=True):
            if size != 1 or letter not in sizes:
                sizes[letter] = size
    operands = tuple(
        broadcast_dims(operand.shape, tuple(term), [sizes[letter] for letter in term])
        for term, operand in zip(terms, call.operands, strict=True)
    )
    return Factors(
        operands=operands, outputs=(tuple(right),), sizes=sizes, sums=frozenset(sizes) - frozenset(right),
        linear=tuple(frozenset({place}) for place in range(len(operands))),
    )  # fmt: skip


def _grouped(call: Call) -> Factors | None:
    """_grouped_mm: rows of x, sorted by group, times their group's matrix. The rows of a group are known at
    run time only: groups are sharded together with their rows.

    x [t, k], w [groups, k, n], ends [groups] -> [t, n]. With x [groups, t, k] it is a batched product; if
    both are matrices, the groups lie along k.
    """
    x, w = call.operands[:2]
    if isinstance(call.arguments.get("bias"), TensorArgument) or call.arguments.get("out_dtype") is not None:
        return None
    pattern = {
        (2, 3): "t! k, e! k n, _ -> t n; sum k; linear 0 1",
        (3, 3): "e t k, e k n -> e t n; sum k; linear 0 1",
        (3, 2): "e! t k, k m!, _ -> t m; sum k; linear 0 1",
        (2, 2): "t k!, k n, _ -> _ t n; linear 0 1",
    }[len(x.shape), len(w.shape)]
    routed = None
    if (len(x.shape), len(w.shape)) == (2, 3):
        routed = Routed(rows="t", groups="e", table=1, by=2, is_sorted=True)
    return dataclasses.replace(_of_operands(pattern, call), local=_aligned, routed=routed)


def _aligned(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardSizes) -> Any:
    """The local grouped product; its kernels need rows of a multiple of 16 bytes, which shards may not
    have."""
    ends = given_by_name(target, args, kwargs).get("offs")
    if "e" in shard.full and shard.is_sharded("e") and "t" in shard.full and shard.is_sharded("t"):
        ends = args[2] if ends is None else ends
        return grouped_product_of_groups, (target, *args[:2], ends, shard.starts["e"][shard.rank]), {}
    if "fallback" in target._schema.name:
        return target, args, kwargs
    return grouped_product_of_part, (target, *args[:2], ends), {}


PRODUCTS: dict[str, Rule] = {
    "linear": text("b* k, o k, o -> b* o; sum k; add 2; linear 0+2 1+2"),
    "matmul": _matmul,
    "mm": text("n k, k m -> n m; sum k; linear 0 1"),
    "bmm": text("b n k, b k m -> b n m; sum k; linear 0 1"),
    "mv": text("n k, k -> n; sum k; linear 0 1"),
    "dot": text("k, k -> ; sum k; linear 0 1"),
    "addmm": _addmm,
    "baddbmm": _baddbmm,
    "_grouped_mm": _grouped,
    "transformers::grouped_mm_fallback": _grouped,
    "bilinear": text("b* i, b* j, o i j, o -> b* o; sum i j; add 3; linear 0+3 1+3 2+3"),
    "convolution": _convolution,
    **dict.fromkeys([f"conv{way}{dims}d" for way in ("", "_transpose") for dims in (1, 2, 3)], _convolution),
    "einsum": _einsum,
}
