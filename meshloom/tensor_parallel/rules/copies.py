"""Copies and constructors of tensors: every dim may be sharded."""

from __future__ import annotations

from meshloom.tensor_parallel.rules.factors import FIRST_LINEAR, Factors, labels_of
from meshloom.tensor_parallel.rules.operator_call import Call, Rule, replicated, to_output_shape


def _stays(call: Call) -> Factors | None:
    """contiguous, to, clone, detach: the shape stays the same."""
    operand = call.operands[0]
    names, sizes = labels_of(operand.shape)
    same = operand.meta.dtype == call.outputs[0].dtype
    operands = (names, *replicated(call.operands[1:]))
    return Factors(operands=operands, outputs=(names,), sizes=sizes, linear=FIRST_LINEAR if same else ())


def _constructor(call: Call) -> Factors | None:
    """A tensor filled with one value: its shape is that of the operand (`zeros_like`), or an argument
    (`zeros`, `new_zeros`)."""
    names, sizes = labels_of(call.outputs[0].shape)
    if call.name.endswith("_like"):
        return Factors(operands=(names,), outputs=(names,), sizes=sizes)
    others = replicated(call.operands)
    return Factors(operands=others, outputs=(names,), sizes=sizes, local=to_output_shape("size"))


COPIES: dict[str, Rule] = {
    **dict.fromkeys(
        ("contiguous", "clone", "alias", "detach", "to", "_to_copy", "lift_fresh_copy", "type_as"), _stays
    ),
    **dict.fromkeys(
        (
            "zeros", "ones", "full", "empty", "rand", "randn", "randint", "zeros_like", "ones_like", "full_like",
            "empty_like", "new_zeros", "new_ones", "new_full", "new_empty",
        ),
        _constructor,
    ),
}  # fmt: skip
