"""Gradients of weights that are computed straight into the place where they are added up.

Autograd would make dW a tensor of its own, put it into `.grad`, and an exchange would copy it into its
bucket:

    by autograd    dW = dY^T X,   .grad = dW,   bucket = .grad     in later chunks   dW = dY^T X,   .grad = dW,   bucket += .grad
    landing        bucket = dY^T X,   .grad is the bucket          in later chunks   bucket += dY^T X,   .grad is the bucket

Whoever looks at a parameter in between finds in `.grad` all that came so far, as ever. So a parameter that is
used elsewhere, too (a tied embedding), comes out right in any order: autograd adds its part to what landed,
and what lands is added to what autograd brought.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Room:
    """Where a parameter's gradient is added up: a tensor of its shape and dtype. filled: gradients of this
    step lie there already, and are not in `.grad`."""

    tensor: Tensor
    filled: bool


class Landing(ABC):
    """Who takes the gradients of linear layers' weights from their backward."""

    @property
    @abstractmethod
    def now(self) -> Landing:
        """One that puts nothing aside."""

    @abstractmethod
    def add(self, weight: Tensor | None, bias: Tensor | None, rows: Tensor, inputs: Tensor) -> None:
        """Add to the gradients of weight [o, k] and bias [o], if given, those for outputs' gradients `rows`
        [n, o] and inputs [n, k]."""


class InPlace(Landing):
    """Adds them up at once. room: where a parameter's gradient belongs; None: in `.grad`."""

    def __init__(self, room: Callable[[Tensor], Room | None] = lambda parameter: None) -> None:
        self._room = room

    @property
    def now(self) -> Landing:
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
        room = self._room(parameter)
        if room is None:
            parameter.grad = make(None)
        else:
            parameter.grad = add_to(room.tensor) if room.filled else make(room.tensor)


def may_land(tensor: Tensor) -> bool:
    """Whether it is a leaf whose gradient autograd would only add up: nobody asked to see, or change, every
    gradient before that."""
    hooked: Any = tensor
    return tensor.is_leaf and tensor.requires_grad and not hooked._backward_hooks
