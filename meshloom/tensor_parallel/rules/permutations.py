"""Permutations of dims (permute, transpose), or of the indices of a dim (flip, roll)."""

from __future__ import annotations

from typing import Any

from meshloom.tensor_parallel.rules.factors import FIRST_LINEAR, Factors, labels_of
from meshloom.tensor_parallel.rules.operator_call import Call, Rule


def _permuted(order: Any) -> Rule:
    def rule(call: Call) -> Factors | None:
        names, sizes = labels_of(call.operands[0].shape)
        out = tuple(names[place] for place in order(call, len(names)))
        return Factors(operands=(names,), outputs=(out,), sizes=sizes, linear=FIRST_LINEAR)

    return rule


def _transposed(call: Call, ndim: int) -> list[int]:
    order = list(range(ndim))
    first, second = ("dim0", "dim1") if "dim0" in call.arguments else ("axis0", "axis1")
    if ndim:
        one, other = call.dim(first, ndim), call.dim(second, ndim)
        order[one], order[other] = order[other], order[one]
    return order


def _moved(call: Call, ndim: int) -> list[int]:
    source, destination = call.dims("source", ndim), call.dims("destination", ndim)
    order = [-1] * ndim
    for one, other in zip(source, destination, strict=True):
        order[other] = one
    rest = iter(each for each in range(ndim) if each not in source)
    return [each if each >= 0 else next(rest) for each in order]


def _unsharded_dims(argument: str) -> Rule:
    """flip, roll: the dims in this argument stay unsharded."""

    def rule(call: Call) -> Factors | None:
        names, sizes = labels_of(call.operands[0].shape)
        dims = call.dims(argument, len(names))
        return Factors(
            operands=(names,), outputs=(names,), sizes=sizes, unsharded=frozenset(f"d{dim}" for dim in dims), linear=FIRST_LINEAR
        )  # fmt: skip

    return rule


PERMUTATIONS: dict[str, Rule] = {
    "permute": _permuted(lambda call, ndim: call.dims("dims", ndim)),
    "transpose": _permuted(_transposed),
    "swapaxes": _permuted(_transposed),
    "swapdims": _permuted(_transposed),
    "movedim": _permuted(_moved),
    "t": _permuted(lambda call, ndim: range(ndim)[::-1]),
    "numpy_T": _permuted(lambda call, ndim: range(ndim)[::-1]),
    "mT": _permuted(lambda call, ndim: [*range(ndim - 2), ndim - 1, ndim - 2]),
    "flip": _unsharded_dims("dims"),
    "roll": _unsharded_dims("dims"),
}
