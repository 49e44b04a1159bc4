"""The result of a training step, as every rank knows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from meshloom.core.device.readback import Readback


class StepResult(NamedTuple):
    """The result of a step: loss (mean over the global batch), its weight, its samples, and the gradient norm
    if clipping is on, which may still be on its way.

    asked: whether some rank asks for something between steps; equal on all. skipped: whether nothing was updated, as gradients overflowed.
    """

    step: int
    loss: float
    weight: float
    samples: int
    norm: Readback | None
    asked: bool = False
    skipped: bool = False
    logged: Mapping[str, float] = {}

    @property
    def gradient_norm(self) -> float | None:
        """Waits for the device, unless a later step's loss is known."""
        return None if self.norm is None else float(self.norm.values())
