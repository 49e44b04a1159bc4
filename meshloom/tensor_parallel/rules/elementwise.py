"""Elementwise operators with broadcasting: every dim may be sharded.

GELU, exp, tanh and all others that torch tags as pointwise have the map of `elementwise` and need no entry in
a table.
"""

from __future__ import annotations

from functools import partial

import torch

from meshloom.tensor_parallel.rules.factors import FIRST_LINEAR, Dims, Factors, broadcast_dims, labels_of
from meshloom.tensor_parallel.rules.operator_call import Call, Rule, TensorArgument


def elementwise(call: Call, linear: tuple[frozenset[int], ...] = ()) -> Factors | None:
    """The factor map of any elementwise operator. linear: as in `Factors`."""
    if any(each.shape != call.outputs[0].shape for each in call.outputs):
        return None
    out = call.outputs[0].shape
    names, sizes = labels_of(out)
    if any(len(each.shape) > len(out) for each in call.operands):
        return None
    operands = tuple(broadcast_dims(each.shape, names, out) for each in call.operands)
    return Factors(operands=operands, outputs=(names,) * len(call.outputs), sizes=sizes, linear=linear)


def is_elementwise(call: Call) -> bool:
    """Whether torch tags the operator as pointwise and deterministic. `rrelu` is not: how many numbers it
    draws depends on the values."""
    tags = getattr(call.node.target, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _sum(call: Call) -> Factors | None:
    """a + b, a - b: partial if both are. A number cannot be partial: every rank would add it."""
    both = frozenset({0, 1}) if len(call.operands) == 2 else frozenset[int]()
    return elementwise(call, (both,) if both else ())


def _product(call: Call) -> Factors | None:
    """a * b: linear in each operand."""
    return elementwise(call, tuple(frozenset({place}) for place in range(len(call.operands))))


def _quotient(call: Call) -> Factors | None:
    numerator = call.arguments.get("self")
    rounds = call.arguments.get("rounding_mode")
    return elementwise(
        call, (frozenset({numerator.number}),) if isinstance(numerator, TensorArgument) and not rounds else ()
    )


def _where(call: Call) -> Factors | None:
    return elementwise(call, (frozenset({1, 2}),) if len(call.operands) == 3 else ())


def _masked_fill(call: Call) -> Factors | None:
    return elementwise(call, FIRST_LINEAR if call.arguments.get("value") == 0 else ())


def _prelu(call: Call) -> Factors | None:
    x, weight = call.operands
    names, sizes = labels_of(x.shape)
    slopes: Dims = ("d1",) if len(weight.shape) == 1 and weight.shape[0] != 1 else (None,) * len(weight.shape)
    return Factors(operands=(names, slopes), outputs=(names,), sizes=sizes)


# Elementwise too, but torch does not tag them as pointwise, or they draw at random.
_UNTAGGED = [
    "bernoulli_", "normal_", "uniform_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_",
    "bernoulli", "rand_like", "randn_like", "randint_like", "native_dropout", "alpha_dropout",
    "selu", "celu", "relu6", "hardtanh", "softplus", "log_sigmoid", "softshrink", "hardshrink", "threshold",
    "mish", "hardswish", "hardsigmoid", "less", "greater", "not_equal", "logical_or", "__and__", "__or__",
    "floor_divide", "fill", "copy", "nan_to_num", "clip", "square",
]  # fmt: skip

ELEMENTWISE: dict[str, Rule] = {
    **dict.fromkeys(("add", "sub", "subtract"), _sum),
    **dict.fromkeys(("mul", "multiply"), _product),
    **dict.fromkeys(("div", "divide", "true_divide"), _quotient),
    **dict.fromkeys(
        ("neg", "real", "imag", "dropout", "dropout_"), partial(elementwise, linear=FIRST_LINEAR)
    ),
    "where": _where,
    "masked_fill": _masked_fill,
    "prelu": _prelu,
    **dict.fromkeys(_UNTAGGED, elementwise),
}
