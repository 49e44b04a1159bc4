"""The one factor by which all gradients may be off: far below the tolerance of each, and seen as it is the same in all."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import torch
from torch import Tensor

from meshloom.verify.between_steps.checks import TensorError
from meshloom.verify.reference.float64_blocks import float64_blocks

_LEAST = 64  # units of rounding, that a factor must be off
_ELEMENTS, _TENSORS = 16, 4  # that it takes to tell a factor from rounding
_SCATTER = 0.2  # of the factor's distance from 1: how far single tensors may be from it


class CommonFactor:
    """Of the tensors of one step, in `precision`."""

    def __init__(self, precision: torch.dtype) -> None:
        self._eps = torch.finfo(precision).eps
        self._factors: list[float] = []

    def add(self, ours: Tensor, reference: Tensor | None) -> None:
        """The next tensor and the reference's, which agree."""
        if reference is None or reference.is_sparse or ours.is_sparse or reference.numel() < _ELEMENTS:
            return
        dot = square = 0.0
        for here, there in zip(
            float64_blocks(ours.to(reference.device)), float64_blocks(reference), strict=True
        ):
            dot, square = dot + float(here @ there), square + float(there @ there)
        if square:
            self._factors.append(dot / square)

    def errors(self, step: int) -> Iterator[TensorError]:
        """One, if the tensors have a factor in common that is not 1."""
        if len(self._factors) < _TENSORS:
            return
        factor = median(self._factors)
        off = abs(factor - 1)
        if off > _LEAST * self._eps and max(abs(each - factor) for each in self._factors) < _SCATTER * off:
            yield TensorError(
                name="all gradients",
                kind="scale",
                step=step,
                error=off,
                tolerance=_LEAST * self._eps,
            )
