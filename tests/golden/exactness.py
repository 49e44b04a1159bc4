"""The proof that a computation is exact: of every operator, that no partial sum of it can round.

A tensor of floating-point numbers has a grain, the largest power of two of which all of its elements are multiples. The terms of a sum are multiples of
the product of their factors' grains, and so is every partial sum, in whatever order and however it is divided over ranks. None of them exceeds the sum of
the terms' magnitudes. If that is less than 2^53 grains (2^24 in float32), all of them are floating-point numbers: nothing rounds, whatever the order, with
or without fused products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DIGITS = {torch.float64: 53, torch.float32: 24}
aten = torch.ops.aten


class Exact(TorchDispatchMode):
    """A context in which an operator that may round is an AssertionError. digits: most that any partial sum may have needed so far."""

    def __init__(self) -> None:
        super().__init__()
        self.digits = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [each.clone() if isinstance(each, Tensor) else each for each in args]  # it may work in place
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        if func.overloadpacket not in SELECTING:
            assert func.overloadpacket in TERMS, f"{func}: nobody has said what it adds up"
            most, terms_grain = TERMS[func.overloadpacket](*given, **kwargs)
            needed = math.ceil(math.log2(most / terms_grain)) if most else 0
            assert needed < DIGITS[result.dtype], (
                f"{func} in step may need {needed} digits of {DIGITS[result.dtype]}"
            )
            self.digits = max(self.digits, needed)
        return result


def grain(value: Tensor | float) -> float:
    """
    >>> grain(torch.tensor([0.75, -2.0, 0.0])), grain(4.0), grain(torch.zeros(2))
    (0.25, 4.0, inf)
    """
    tensor = torch.as_tensor(value, dtype=torch.float64).reshape(-1)
    tensor = tensor[tensor != 0]
    if not len(tensor):
        return math.inf
    mantissa, exponent = torch.frexp(tensor)
    whole = (mantissa * 2.0**53).long()
    lowest = torch.log2((whole & -whole).double())
    return 2.0 ** float((lowest + exponent - 53).min())


def size(value: Tensor | float) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64).abs()


Terms = tuple[float, float]  # the largest sum of magnitudes of an element's terms, and their grain


def of_product(a: Tensor, b: Tensor | float) -> Terms:
    return float((size(a) * size(b)).max()), grain(a) * grain(b)


def of_sum(a: Tensor, b: Tensor | float, alpha: float = 1) -> Terms:
    return float((size(a) + size(b) * abs(alpha)).max()), min(grain(a), grain(b) * grain(float(alpha)))


def of_matrices(a: Tensor, b: Tensor) -> Terms:
    return float((size(a) @ size(b)).max()), grain(a) * grain(b)


def of_layer(bias: Tensor, a: Tensor, b: Tensor) -> Terms:
    return float((size(a) @ size(b) + size(bias)).max()), min(grain(a) * grain(b), grain(bias))


def of_all(a: Tensor, *_: Any, **__: Any) -> Terms:
    """Whatever of it is added up."""
    return float(size(a).sum()), grain(a)


def of_quotient(a: Tensor, b: Tensor | float) -> Terms:
    divisors = size(b).reshape(-1)
    assert (torch.frexp(divisors).mantissa == 0.5).all(), (
        f"divided by {divisors.tolist()}, which are no powers of two"
    )
    return float((size(a) / size(b)).max()), grain(a) / float(divisors.max())


TERMS: Mapping[Any, Callable[..., Terms]] = {
    aten.mul: of_product, aten.mul_: of_product, aten.add: of_sum, aten.add_: of_sum, aten.sub: of_sum, aten.mm: of_matrices, aten.bmm: of_matrices,
    aten.addmm: of_layer, aten.sum: of_all, aten.embedding_dense_backward: of_all, aten.div: of_quotient, aten.div_: of_quotient,
}  # fmt: skip
# Each element of the result is one of the operands', or zero or one, or its opposite.
SELECTING = {
    aten.relu, aten.threshold_backward, aten.embedding, aten.view, aten._unsafe_view, aten.t, aten.transpose, aten.expand, aten.unsqueeze, aten.squeeze,
    aten.detach, aten.clone, aten.neg, aten.ones_like, aten.zeros_like, aten.select, aten.slice, aten.copy_, aten._to_copy, aten.stack, aten.cat, aten.alias,
    aten.empty, aten.empty_like, aten.new_empty, aten.new_empty_strided, aten.lift_fresh, aten.index, aten.scalar_tensor, aten.zeros, aten.fill_, aten.ones,
}  # fmt: skip
