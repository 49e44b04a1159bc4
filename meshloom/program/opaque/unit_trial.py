"""What a call returned with some of its hidden units at a time, and whether that adds up to what it returns with all."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from meshloom.program.opaque.asked_of_units import AskedOfUnits
from meshloom.program.opaque.hidden_units import HiddenUnits, Kind

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # of the largest element; other orders of sums


@dataclass(frozen=True, kw_only=True)
class UnitTrial:
    """What a call returned with all units, with none, and with some at a time, of which there are as many as `sizes`."""

    given: Any
    state: Sequence[Tensor]
    whole: Sequence[Tensor]
    none: Sequence[Tensor]
    some: Sequence[Sequence[Tensor]]
    sizes: Sequence[int]
    asked: AskedOfUnits
    rest_flops: int
    tolerance: float

    def kinds(self) -> tuple[Kind, ...]:
        """What units add to each result."""
        every = zip(self.none, self.whole, *self.some, strict=True)
        return tuple(
            "same"
            if all(_is_near(each, values[0], self.tolerance) for each in values)
            else ("rest" if values[0].any() else "sum")
            for values in every
        )

    def gradients(self, units: HiddenUnits) -> dict[int, Tensor] | None:
        """Identity of a tensor -> its gradient; None: results or gradients are no sum over units."""
        added = [
            replace(units, held=size, is_first=number == 0).added(each, self.none)
            for number, (size, each) in enumerate(zip(self.sizes, self.some, strict=True))
        ]
        total = [functools.reduce(torch.add, each) for each in zip(*added, strict=True)]
        if not self._are_near(total, self.whole):
            return None
        leaves = [
            each
            for each in (*tree_leaves(self.given), *self.state)
            if isinstance(each, Tensor) and each.requires_grad
        ]
        with self.asked.watching():
            gradients = _gradients(self.whole, leaves)
        if self.asked.has_asked or not self._are_near(_gradients(total, leaves), gradients):
            return None
        return {id(leaf): each for leaf, each in zip(leaves, gradients, strict=True)}

    def _are_near(self, some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
        # what all but cancels, as gradients of a router that is sure, has the rounding of what it is made of
        least = max((float(each.abs().max()) for each in others if each.numel()), default=0.0) / 1000
        pairs = zip(some, others, strict=True)
        return all(_is_near(one, other, self.tolerance, max(1e-3, least)) for one, other in pairs)


def _is_near(one: Tensor, other: Tensor, tolerance: float, least: float = 1e-3) -> bool:
    """Whether tensors differ by little: of the largest element, or of `least`."""
    if one.shape != other.shape or not other.numel():
        return one.shape == other.shape
    return bool((one - other).abs().max() <= tolerance * max(least, float(other.abs().max())))


def _gradients(results: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Of a random sum of the results, by all that they are computed from."""
    source = torch.Generator().manual_seed(1)
    roots = [each for each in results if each.requires_grad]
    weights = [torch.rand(each.shape, generator=source, dtype=each.dtype).to(each.device) for each in roots]
    found = torch.autograd.grad(roots, leaves, weights, retain_graph=True, allow_unused=True)
    return [
        torch.zeros_like(leaf) if each is None else each for leaf, each in zip(leaves, found, strict=True)
    ]
