"""The dynamic loss scale of float16, as a value, and divisors that a device alone knows.

Float16 has no numbers below 6e-8, where many gradients are. So a backward begins at the loss times a *scale*, and finished
gradients are divided by it. If some element of them is not finite, all ranks skip the update, and the scale halves.

    scale  65536  65536  32768  32768 ...  32768  65536        good steps count from the last change
    step   good   skip   good   good  ...  good (the 2,000th)  good

Source: Micikevicius et al., "Mixed Precision Training" (2018); the numbers are those of `torch.amp.GradScaler`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshloom.core.errors import CheckpointError

START = 2.0**16
GROW_AFTER = 2000  # good steps
LEAST = 2.0**-24  # float16's smallest number: a gradient that overflows below it is infinite at any scale


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The scale of a step's loss, a power of two. good_steps: updates since it changed. skipped: steps of the run so far whose
    gradients overflowed."""

    scale: float = START
    good_steps: int = 0
    skipped: int = 0

    def after(self, *, overflowed: bool) -> LossScale:
        """The scale of the next step.

        >>> LossScale().after(overflowed=True)
        LossScale(scale=32768.0, good_steps=0, skipped=1)
        >>> LossScale(good_steps=1999, skipped=1).after(overflowed=False)
        LossScale(scale=131072.0, good_steps=0, skipped=1)
        """
        if overflowed:
            return LossScale(scale=self.scale / 2, skipped=self.skipped + 1)
        if self.good_steps + 1 < GROW_AFTER:
            return LossScale(scale=self.scale, good_steps=self.good_steps + 1, skipped=self.skipped)
        return LossScale(scale=self.scale * 2, skipped=self.skipped)

    def to_dict(self) -> dict[str, float | int]:
        """JSON-able values."""
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped": self.skipped}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> LossScale:
        """The inverse of `to_dict`. Raises `CheckpointError`."""
        try:
            return LossScale(
                scale=float(values["scale"]),
                good_steps=int(values["good_steps"]),
                skipped=int(values["skipped"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The checkpoint's loss scale is {values!r}, which is not a scale with its good and skipped steps. Go on from another checkpoint."
            ) from error
