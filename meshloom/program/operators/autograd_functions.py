"""Rewrites autograd functions with a custom backward as differentiable operators.

If a function's backward multiplies the incoming gradient by a tensor k, element by element (activations,
clipped derivatives, straight-through rounding), it is rewritten as

    y = f(x) + (x - x) k    with f(x), k and the second x detached

which has the value of f wherever x and k are finite, and the gradient of the custom backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshloom.core.errors import CaptureError
from meshloom.program.ir.lines import WAYS_OUT, SourcePlace

MAX_TRIED = 65536  # elements: a function that changes one number in ten thousand is detected
# no function of values calls these
_REFUSES = ("mark_dirty", "mark_non_differentiable", "save_for_forward")


@dataclass(frozen=True, kw_only=True)
class Applied:
    """A call of an autograd function: its arguments (of tensors only shapes count), and where it is."""

    function: Any
    args: tuple[Any, ...]
    place: SourcePlace


class _Context:
    """The `ctx` that a function's forward fills for its backward."""

    saved_tensors: tuple[Tensor, ...] = ()

    def __init__(self, args: Sequence[Any]) -> None:
        self.needs_input_grad = tuple(isinstance(each, Tensor) for each in args)

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Ignored: every output has a gradient here."""


def with_operators(applied: Applied) -> Tensor:
    """The result, with the gradient of the function's backward. Raises `CaptureError` for unfit shapes."""
    args = applied.args
    y, backward = _run(applied, [each.detach() if isinstance(each, Tensor) else each for each in args])
    tensors = [each for each in args if isinstance(each, Tensor)]
    fits = isinstance(y, Tensor) and all(
        each.is_floating_point() and each.shape == y.shape for each in tensors
    )
    if not fits:
        raise refusal(applied)
    y = y.detach()
    factors = backward(torch.ones_like(y))
    for x, k in zip(args, factors, strict=True):
        if isinstance(x, Tensor) and x.requires_grad and k is not None:
            y = y + (x - x.detach()) * k.detach()
    return y


def check_products(applied: Iterable[Applied]) -> None:
    """Raise `CaptureError` unless every backward is a product with the incoming gradient, which is tested
    with numbers of all magnitudes and signs, once for equal calls.

    Tensors have at most `MAX_TRIED` elements, unless that fails; then the shapes of the call. Calls whose shapes depend on
    values are left out: no program has these.
    """
    for each in {_use(each): each for each in applied if _has_shapes(each)}.values():
        try:
            _check_product(_smaller(each))
        except CaptureError:
            _check_product(each)


def _has_shapes(applied: Applied) -> bool:
    return all(
        isinstance(size, int) for each in applied.args if isinstance(each, Tensor) for size in each.shape
    )


def _use(applied: Applied) -> tuple[Any, ...]:
    """Equal for calls that need one test."""
    return applied.function, *(
        tuple(each.shape) if isinstance(each, Tensor) else repr(each) for each in applied.args
    )


def _smaller(applied: Applied) -> Applied:
    """The same call with smaller tensors: equal sizes stay equal, and different ones different."""
    shapes = [each.shape for each in applied.args if isinstance(each, Tensor)]
    sizes = {size: size for shape in shapes for size in shape}
    while any(math.prod(sizes[size] for size in shape) > MAX_TRIED for shape in shapes):
        largest = max(sizes, key=lambda size: sizes[size])
        half = sizes[largest] // 2
        while half in sizes.values():
            half -= 1
        sizes[largest] = max(half, 1)
    args = tuple(
        torch.empty([sizes[size] for size in each.shape], device="meta") if isinstance(each, Tensor) else each
        for each in applied.args
    )
    return replace(applied, args=args)


def _check_product(applied: Applied) -> None:
    source = torch.Generator().manual_seed(0)
    for signs in (1.0, -1.0, None):
        args = [
            _sample(each.shape, signs, source) if isinstance(each, Tensor) else each for each in applied.args
        ]
        try:
            y, backward = _run(applied, args)
            incoming = torch.randn(y.shape, generator=source, dtype=y.dtype)
            wanted, factors = backward(incoming), backward(torch.ones_like(y))
            is_product = all(
                one is other is None or _are_close(one, incoming * other)
                for one, other in zip(wanted, factors, strict=True)
            )
        except Exception as error:
            raise refusal(applied) from error
        if not is_product:
            raise refusal(applied)


def refusal(applied: Applied) -> CaptureError:
    """The error for a function that cannot be rewritten."""
    return CaptureError(
        f"{applied.function.__name__}.apply at {applied.place} has a custom backward, which a program cannot represent unless it multiplies "
        f"the incoming gradient element by element. Write it with torch operators. {WAYS_OUT}"
    ).at(None, applied.place.line)


def _run(applied: Applied, args: Sequence[Any]) -> tuple[Any, Any]:
    """The function's result and its backward."""
    function, context = applied.function, _Context(args)
    with torch.no_grad():
        try:
            if function.setup_context is torch.autograd.Function.setup_context:
                y = function.forward(context, *args)
            else:
                y = function.forward(*args)
                function.setup_context(context, tuple(args), y)
        except AttributeError as error:
            if any(name in str(error) for name in _REFUSES):
                raise refusal(applied) from error
            raise

    def backward(incoming: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            found = function.backward(context, incoming)
        gradients = found if isinstance(found, tuple) else (found,)
        # of arguments that a call leaves out, torch takes None
        further = gradients[len(args) :]
        return gradients[: len(args)] if all(each is None for each in further) else gradients

    return y, backward


def _sample(shape: torch.Size, sign: float | None, source: torch.Generator) -> Tensor:
    """Numbers of magnitude 1e-8 to 100, as float64."""
    size = 10 ** (10 * torch.rand(shape, generator=source, dtype=torch.float64) - 8)
    if sign is not None:
        return size * sign
    return size * torch.randn(shape, generator=source, dtype=torch.float64).sign()


def _are_close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(
        torch.isclose(one.double(), other.double(), rtol=1e-6, atol=1e-12, equal_nan=True).all()
    )
