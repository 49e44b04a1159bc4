"""Operators that work element by element, with broadcasting: every dim may be cut."""

from __future__ import annotations

import torch

from meshloom.tensor_parallel.rules.call import Call, Operand, Rule
from meshloom.tensor_parallel.rules.factors import Dims, Factors


def elementwise(call: Call, linear: tuple[frozenset[int], ...] = ()) -> Factors | None:
    """The map of any pointwise operator."""
    if any(each.shape != call.outputs[0].shape for each in call.outputs):
        return None
    out = call.outputs[0].shape
    names = tuple(f"d{place}" for place in range(len(out)))
    operands: list[Dims] = []
    for operand in call.operands:
        lead = len(out) - len(operand.shape)
        if lead < 0:
            return None
        operands.append(
            tuple(
                None if size != out[lead + place] else names[lead + place]
                for place, size in enumerate(operand.shape)
            )
        )
    return Factors(
        operands=tuple(operands),
        outputs=(names,) * len(call.outputs),
        sizes=dict(zip(names, out, strict=True)),
        linear=linear,
    )


def is_elementwise(call: Call) -> bool:
    """Whether torch says so. Draws are not: how many numbers `rrelu` takes depends on the values."""
    tags = getattr(call.node.target, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _sum(call: Call) -> Factors | None:
    """a + b, a - b: partial if both are. A number is not: it would be added by every rank."""
    both = frozenset({0, 1}) if len(call.operands) == 2 else frozenset[int]()
    return elementwise(call, (both,) if both else ())


def _product(call: Call) -> Factors | None:
    """a * b: linear in each."""
    return elementwise(call, tuple(frozenset({place}) for place in range(len(call.operands))))


def _quotient(call: Call) -> Factors | None:
    numerator = call.arguments.get("self")
    rounds = call.arguments.get("rounding_mode")
    return elementwise(
        call, (frozenset({numerator.number}),) if isinstance(numerator, Operand) and not rounds else ()
    )


def _first(call: Call) -> Factors | None:
    return elementwise(call, (frozenset({0}),))


def _where(call: Call) -> Factors | None:
    return elementwise(call, (frozenset({1, 2}),) if len(call.operands) == 3 else ())


def _masked_fill(call: Call) -> Factors | None:
    return elementwise(call, (frozenset({0}),) if call.arguments.get("value") == 0 else ())


def _any(call: Call) -> Factors | None:
    return elementwise(call)


def _prelu(call: Call) -> Factors | None:
    x, weight = call.operands
    names = tuple(f"d{place}" for place in range(len(x.shape)))
    slopes: Dims = ("d1",) if len(weight.shape) == 1 and weight.shape[0] != 1 else (None,) * len(weight.shape)
    return Factors(operands=(names, slopes), outputs=(names,), sizes=dict(zip(names, x.shape, strict=True)))


ELEMENTWISE: dict[str, Rule] = {
    **dict.fromkeys(("add", "sub", "subtract"), _sum),
    **dict.fromkeys(("mul", "multiply"), _product),
    **dict.fromkeys(("div", "divide", "true_divide"), _quotient),
    **dict.fromkeys(("neg", "real", "imag"), _first),
    "where": _where,
    "masked_fill": _masked_fill,
    **dict.fromkeys(
        (
            "bernoulli_",
            "normal_",
            "uniform_",
            "exponential_",
            "log_normal_",
            "cauchy_",
            "geometric_",
            "random_",
        ),
        _any,
    ),
    **dict.fromkeys(("dropout", "dropout_"), _first),
    # Pointwise too, though torch does not tag them.
    **dict.fromkeys(
        (
            "native_dropout",
            "alpha_dropout",
            "selu",
            "celu",
            "relu6",
            "hardtanh",
            "softplus",
            "log_sigmoid",
            "bernoulli",
        ),
        _any,
    ),
    **dict.fromkeys(
        (
            "rand_like",
            "randn_like",
            "randint_like",
            "floor_divide",
            "fill",
            "copy",
            "softshrink",
            "hardshrink",
            "threshold",
        ),
        _any,
    ),
    **dict.fromkeys(
        (
            "less",
            "greater",
            "not_equal",
            "nan_to_num",
            "clip",
            "square",
            "mish",
            "hardswish",
            "hardsigmoid",
            "logical_or",
            "__and__",
            "__or__",
        ),
        _any,
    ),
    "prelu": _prelu,
}
