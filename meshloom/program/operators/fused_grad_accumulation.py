"""Gradients of weights that are computed directly into the buffer in which they accumulate.

Autograd allocates dW and puts it into `.grad`, and an exchange copies it into its bucket:

    by autograd    dW = dY^T X,   .grad = dW,   bucket = .grad     later chunks:   dW = dY^T X,   .grad = dW,   bucket += .grad
    fused          bucket = dY^T X,   .grad is the bucket          later chunks:   bucket += dY^T X,   .grad is the bucket

`.grad` always holds the sum so far. So a parameter that is also used elsewhere (a tied embedding) is right in
any order: autograd adds to the fused sum, and fused gradients are added to autograd's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GradBuffer:
    """The buffer of a parameter's gradient. filled: it holds gradients of this step that `.grad` lacks."""

    tensor: Tensor
    filled: bool

    def add(self, gradient: Tensor) -> None:
        """Adds a gradient, or overwrites what is there if that is not filled."""
        add_gradient(self.tensor, gradient, filled=self.filled)


def add_gradient(buffer: Tensor, gradient: Tensor, *, filled: bool) -> None:
    """Adds a gradient to a buffer, or overwrites what is there if that is not filled."""
    # Gradients require no gradient, so autograd records nothing here.
    if gradient is buffer:
        return  # it was accumulated in place
    if filled:
        buffer.add_(gradient)
    elif gradient.layout is torch.strided:
        buffer.copy_(gradient)
    else:
        buffer.zero_().add_(gradient)


class GradAccumulator(ABC):
    """Accumulates the gradients of linear layers' weights, called by their backward."""

    @property
    @abstractmethod
    def now(self) -> GradAccumulator:
        """An accumulation that defers nothing."""

    @abstractmethod
    def add(self, weight: Tensor | None, bias: Tensor | None, rows: Tensor, inputs: Tensor) -> None:
        """Add to the gradients of weight [o, k] and bias [o], if given: outputs' gradients `rows` [n, o] and
        inputs [n, k]."""


class DirectAccumulator(GradAccumulator):
    """Accumulates immediately. grad_buffer: the buffer of a parameter's gradient; None: `.grad`."""

    def __init__(self, grad_buffer: Callable[[Tensor], GradBuffer | None] = lambda parameter: None) -> None:
        self._grad_buffer = grad_buffer

    @property
    def now(self) -> GradAccumulator:
        return self

    def add(self, weight: Tensor | None, bias: Tensor | None, rows: Tensor, inputs: Tensor) -> None:
        with torch.no_grad():
            if weight is not None:
                product = partial(torch.mm, rows.t(), inputs)
                self._add(weight, product, lambda total: total.addmm_(rows.t(), inputs))
            if bias is not None:
                self._add(bias, partial(torch.sum, rows, 0), lambda total: total.add_(rows.sum(0)))

    def _add(
        self, parameter: Tensor, compute: Callable[..., Tensor], add_to: Callable[[Tensor], Tensor]
    ) -> None:
        """compute: the gradient, as a new tensor or to `out`. add_to: adds it to a tensor."""
        here = parameter.grad
        grad_buffer = self._grad_buffer(parameter) if here is None else None
        if here is not None:
            parameter.grad = add_to(here) if here.layout == torch.strided else compute().add_(here)
        elif grad_buffer is None:
            parameter.grad = compute()
        else:
            buffer = grad_buffer.tensor
            parameter.grad = add_to(buffer) if grad_buffer.filled else compute(out=buffer)


def can_accumulate(tensor: Tensor) -> bool:
    """Whether it is a leaf without hooks, whose gradient autograd would only accumulate."""
    hooked: Any = tensor
    return tensor.is_leaf and tensor.requires_grad and not hooked._backward_hooks
