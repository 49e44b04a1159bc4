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
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GradBuffer:
    """The buffer of a parameter's gradient. filled: it holds gradients of this step that `.grad` lacks."""

    tensor: Tensor
    filled: bool


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
                self._add(
                    weight,
                    lambda out: torch.mm(rows.t(), inputs, out=out),
                    lambda total: total.addmm_(rows.t(), inputs),
                )
            if bias is not None:
                self._add(
                    bias, lambda out: torch.sum(rows, 0, out=out), lambda total: total.add_(rows.sum(0))
                )

    def _add(
        self, parameter: Tensor, make: Callable[[Tensor | None], Tensor], add_to: Callable[[Tensor], Tensor]
    ) -> None:
        here = parameter.grad
        if here is not None:
            parameter.grad = add_to(here) if here.layout == torch.strided else make(None).add_(here)
            return
        grad_buffer = self._grad_buffer(parameter)
        if grad_buffer is None:
            parameter.grad = make(None)
        else:
            parameter.grad = add_to(grad_buffer.tensor) if grad_buffer.filled else make(grad_buffer.tensor)


def can_accumulate(tensor: Tensor) -> bool:
    """Whether it is a leaf without hooks, whose gradient autograd would only accumulate."""
    hooked: Any = tensor
    return tensor.is_leaf and tensor.requires_grad and not hooked._backward_hooks
