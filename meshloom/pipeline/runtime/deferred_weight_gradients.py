"""Gradients of weights that are computed later than those of inputs, so that other ranks need not wait for
them.

I   dX = dY W, and (X, dY) are put aside        W   W.grad += dY^T X, b.grad += sum of dY
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from meshloom.program.operators.fused_grad_accumulation import Landing


class Later(Landing):
    """What was put aside in a backward, for `landing`. collecting: whether backwards put aside at all;
    otherwise they compute all at once."""

    def __init__(self, landing: Landing) -> None:
        self.collecting = False
        self._landing = landing
        self._pending: list[Callable[[], None]] = []

    @property
    def now(self) -> Landing:
        return self._landing.now

    def add(self, weight: Tensor | None, bias: Tensor | None, rows: Tensor, inputs: Tensor) -> None:
        if self.collecting:
            self._pending.append(lambda: self._landing.add(weight, bias, rows, inputs))
        else:
            self._landing.add(weight, bias, rows, inputs)

    def take(self) -> list[Callable[[], None]]:
        """All that was put aside, to be called in turn."""
        pending, self._pending = self._pending, []
        return pending
