"""Copies and new tensors: a part of one is made by asking for a part."""

from __future__ import annotations

from meshloom.tensor_parallel.rules.arguments import to_output_shape
from meshloom.tensor_parallel.rules.call import Call, Rule
from meshloom.tensor_parallel.rules.factors import Dims, Factors, labels_of

_FIRST = (frozenset({0}),)


def _stays(call: Call) -> Factors | None:
    """The same shape: contiguous, to, clone, detach."""
    operand = call.operands[0]
    names, sizes = labels_of(operand.shape)
    same = operand.meta.dtype == call.outputs[0].dtype
    others: tuple[Dims, ...] = tuple((None,) * len(each.shape) for each in call.operands[1:])
    return Factors(
        operands=(tuple(names), *others), outputs=(tuple(names),), sizes=sizes, linear=_FIRST if same else ()
    )


def _constructor(call: Call) -> Factors | None:
    """Filled with one value: any part of it is filled with it, too."""
    names, sizes = labels_of(call.outputs[0].shape)
    return Factors(operands=(), outputs=(tuple(names),), sizes=sizes, local=to_output_shape("size"))


def _constructor_like(call: Call) -> Factors | None:
    """The same, with the shape given (`new_zeros`) or that of the operand (`zeros_like`)."""
    names, sizes = labels_of(call.outputs[0].shape)
    if call.name.endswith("_like"):
        return Factors(operands=(tuple(names),), outputs=(tuple(names),), sizes=sizes)
    other: Dims = (None,) * len(call.operands[0].shape)
    return Factors(operands=(other,), outputs=(tuple(names),), sizes=sizes, local=to_output_shape("size"))


COPIES: dict[str, Rule] = {
    **dict.fromkeys(
        ("contiguous", "clone", "alias", "detach", "to", "_to_copy", "lift_fresh_copy", "type_as"), _stays
    ),
    **dict.fromkeys(("zeros", "ones", "full", "empty", "rand", "randn", "randint"), _constructor),
    **dict.fromkeys(
        (
            "zeros_like",
            "ones_like",
            "full_like",
            "empty_like",
            "new_zeros",
            "new_ones",
            "new_full",
            "new_empty",
        ),
        _constructor_like,
    ),
}
