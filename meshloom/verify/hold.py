"""Holds the records of a plan's run against one device, step by step: compares, and asks for the cause when something differs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from meshloom.verify.compare import Comparer, Comparison
from meshloom.verify.diagnose import diagnose
from meshloom.verify.mistakes import Cause
from meshloom.verify.records import StepRecord
from meshloom.verify.reference import Reference
from meshloom.verify.whole_batch import WholeBatch, compare_whole_batch


@dataclass(frozen=True, kw_only=True)
class Found:
    """What came of holding records against a reference. whole: None if the whole batch does not fit in the device's memory."""

    steps: Sequence[Comparison]
    causes: Sequence[Cause]
    whole: WholeBatch | None
    comparer: Comparer


def hold_against(reference: Reference, records: Iterable[StepRecord]) -> Found:
    """Compare each record with the reference's next step; the causes are those of the first step that differs."""
    comparer = Comparer(plan=reference.plan, precision=reference.precision, initial=reference.initial)
    steps: list[Comparison] = []
    causes: list[Cause] = []
    whole: WholeBatch | None = None
    previous: StepRecord | None = None
    for ours in records:
        reference.run()
        one = reference.update(ours.gradients if comparer.agree(ours.gradients, reference.gradients, reference.casts) else None)
        comparison = comparer.compare(ours, one)
        if not comparison.passed and all(step.passed for step in steps):
            causes = diagnose(comparison, ours, one, reference.evidence(previous), steps)
        if not steps:
            with suppress(torch.OutOfMemoryError):  # microbatches may be there because the whole batch does not fit
                whole = compare_whole_batch(reference, one, comparer.tolerance())
        steps.append(comparison)
        previous = one
    return Found(steps=steps, causes=causes, whole=whole, comparer=comparer)
