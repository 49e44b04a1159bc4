"""The reference's own loss scale: a plain loop's, as in torch's recipe of automatic mixed precision.

(loss * scale).backward();  gradients /= scale;  some not finite: no update, scale /= 2;  2,000 updates in a row: scale *= 2
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from meshloom.core.plan import Plan

PRECISIONS = ("fp16-mixed",)  # that need one
INTERVAL = 2000


class ReferenceScale:
    """value: by which the next step's loss is multiplied; 1 under plans without a scale. overflowed: whether the newest step's
    gradients did."""

    def __init__(self, plan: Plan) -> None:
        self.is_used = plan.precision in PRECISIONS
        self.value = 65536.0 if self.is_used else 1.0
        self.overflowed = False
        self._updates = 0

    def look(self, gradients: Iterable[Tensor | None]) -> None:
        """Before an update: whether it is to be skipped."""
        self.overflowed = self.is_used and any(
            not bool(each.to_dense().isfinite().all()) for each in gradients if each is not None
        )

    def end(self) -> None:
        """After the update, or where it would have been."""
        self._updates = 0 if self.overflowed else self._updates + 1
        if self.overflowed:
            self.value /= 2
        elif self.is_used and self._updates == INTERVAL:
            self.value, self._updates = self.value * 2, 0
