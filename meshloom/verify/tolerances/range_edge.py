"""Updates at fp16-mixed that one side alone skips: whether a gradient is so near the end of float16's range that rounding decides.

One device runs the step's chunks once more with half the loss scale, where what is near the end does not overflow, and again with parameters that
are off by rounding:

    size     twice the largest element of a float16 gradient: what it is with the scale
    moved    how far rounding moves that, as a share; at least two of float16's units

    |size - 65504| <= moved * 65504    either may skip, and one device does as the plan's gradients say

Only where operators are divided or compiled: others give the same bits on both sides, so that both overflow or neither does.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshloom.verify.reference.observers import LargestHalf
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.reruns import perturbed_parameters
from meshloom.verify.reference.step_records import StepRecord
from meshloom.verify.tolerances.of_precision import most_tolerated, rounds_partial_sums

_RANGE = torch.finfo(torch.float16)
_LEAST, _MOST = 2 * _RANGE.eps, most_tolerated(torch.float16)


class RangeEdge:
    """Of one step after another of `reference`. For other precisions it does nothing."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._rounds = rounds_partial_sums(reference.plan)
        self._finite = True  # the plan's gradients of this step
        self._largest: _Largest | None = None
        self._alone = False  # whether the gradients of one side alone overflow

    def begin(self) -> None:
        """After one device's backward. Where its gradients overflow by what may be rounding, it gets those of half the scale, which are finite."""
        self._finite, self._largest, self._alone = True, None, False
        scale = self._reference.scale
        if scale.overflowed and self._rounds:
            self._largest, finite = _measured(self._reference)
            if self._largest.is_at_edge:
                for name, gradient in finite.items():
                    self._reference.parameters[name].grad = gradient
                scale.lower()

    def look(self, ours: Tensor | None) -> None:
        """At the plan's next averaged gradient."""
        if self._reference.scale.is_used and ours is not None:
            self._finite = self._finite and bool(ours.to_dense().isfinite().all())

    def settle(self) -> bool:
        """After all: whether one device skips its update because the plan's gradients overflow, though its own are finite."""
        scale = self._reference.scale
        if scale.is_lowered:
            self._alone, scale.overflowed = self._finite, not self._finite
            return not self._finite
        self._alone = self._finite == scale.overflowed
        if self._alone:
            self._largest = self._largest or _measured(self._reference)[0]
        skips = (
            self._alone
            and not scale.overflowed
            and self._rounds
            and bool(self._largest and self._largest.is_at_edge)
        )
        scale.overflowed = scale.overflowed or skips
        return skips

    def noted(self, record: StepRecord) -> StepRecord:
        """One device's record of the step, with what is known of an overflow on one side."""
        if not self._alone or self._largest is None:
            return record
        return replace(record, overflow=self._largest.sentence)


@dataclass(frozen=True, kw_only=True)
class _Largest:
    """The largest element of one device's gradients in float16, with the loss scaled by `scale`."""

    size: float
    moved: float
    scale: float

    @property
    def is_at_edge(self) -> bool:
        return abs(self.size / _RANGE.max - 1) <= self.moved

    @property
    def sentence(self) -> str:
        return (
            f"with the loss scaled by {self.scale:g} the largest float16 gradient on one device is {self.size:.6g}, which rounding moves by {self.moved:.1%}, "
            f"and float16 ends at {_RANGE.max:g}"
        )


def _measured(reference: Reference) -> tuple[_Largest, Mapping[str, Tensor]]:
    """And the gradients at half the scale, by name."""
    sizes: list[float] = []
    finite: dict[str, Tensor] = {}
    for moved in (False, True):
        changed = perturbed_parameters(reference) if moved else nullcontext()
        with reference.scale.halved(), reference.rerun(), changed:
            with LargestHalf() as seen:
                reference.evaluate(watched=False)
            sizes.append(2 * seen.size)
            if not moved:
                finite = {
                    name: each.clone() for name, each in reference.gradients.items() if each is not None
                }
    effect = abs(sizes[1] / sizes[0] - 1) if sizes[0] else 0.0
    largest = _Largest(
        size=sizes[0], moved=max(_LEAST, effect) if effect < _MOST else _MOST, scale=reference.scale.value
    )
    return largest, finite
