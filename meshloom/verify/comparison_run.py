"""Holds the steps of a plan against one device, tensor by tensor as they come, and asks for the cause when
something differs.

A step, in order; only numbers are kept of it:

    begin       one device computes its gradients
    gradient    each of the plan's is compared, and takes the place of one device's if they agree
    update      one device updates
    state       each parameter and buffer of the plan's is compared, and parameters that agree take the place of one device's
    end         what else the step was, and the verdict
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from meshloom.verify.compare import Comparer, Comparison, GradientErrors, StateErrors
from meshloom.verify.diagnose import diagnose
from meshloom.verify.reference.mistakes import Cause, Evidence, subsample
from meshloom.verify.reference.reference import Gradients, Reference
from meshloom.verify.reference.reruns import full_evidence, initial_evidence, rounding_effect
from meshloom.verify.reference.step_records import StepRecord
from meshloom.verify.whole_batch import WholeBatch, compare_whole_batch


@dataclass(frozen=True, kw_only=True)
class ComparisonResult:
    """What came of holding a plan against a reference. whole: None if the whole batch does not fit in the
    device's memory."""

    steps: Sequence[Comparison]
    causes: Sequence[Cause]
    whole: WholeBatch | None
    comparer: Comparer


class ComparisonRun:
    """Steps of a plan held against those of `reference`, which it runs."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._comparer = Comparer(plan=reference.plan, precision=reference.precision)
        self._steps: list[Comparison] = []
        self._causes: list[Cause] = []
        self._whole: WholeBatch | None = None
        self._previous: Gradients | None = None  # thinned
        self._gradients: GradientErrors
        self._state: StateErrors
        self._one: StepRecord
        self._evidence: Evidence
        self.subsampled: Gradients = {}  # of the plan's gradients in this step

    def begin(self) -> None:
        """A new step: one device's forward and backward."""
        reference = self._reference
        reference.run()
        tolerance = self._comparer.tolerance(reference.casts)
        if not self._steps:
            # microbatches may be there because the whole batch does not fit
            with suppress(torch.OutOfMemoryError):
                self._whole = compare_whole_batch(reference, tolerance)
        # afterwards the two are no longer at the same parameters
        agreed = all(step.passed for step in self._steps)
        self._gradients = GradientErrors(
            reference.gradients,
            reference.step,
            tolerance,
            partial(rounding_effect, reference) if agreed else None,
        )
        self.subsampled = {}

    def gradient(self, name: str, ours: Tensor | None) -> None:
        """The plan's next averaged gradient; nothing of it is kept."""
        self.subsampled[name] = None if ours is None else subsample(ours)
        if self._gradients.take(name, ours).passed:
            self._reference.replace_gradient(name, ours)

    def update(self) -> None:
        """All gradients have come: one device updates. If some differ, why is looked for now, while its
        parameters are those that they are of."""
        reference = self._reference
        self._evidence = initial_evidence(reference, self._gradients.norms, self._previous)
        if not all(error.passed for error in self._gradients.errors()) and all(
            step.passed for step in self._steps
        ):
            self._evidence = full_evidence(reference, self._evidence)
        self._one = reference.update()
        self._state = StateErrors(
            reference.parameters, reference.before, dict(reference.model.named_buffers()), step=self._one.step,
            tolerance=self._comparer.tolerance(self._one.casts), updated=self._comparer.tolerance(updated=True),
        )  # fmt: skip

    def state(self, name: str, ours: Tensor) -> None:
        """The plan's next parameter or buffer after the step; nothing of it is kept."""
        if all(error.passed for error in self._state.take(name, ours)) and name in self._reference.parameters:
            self._reference.replace_parameter(name, ours)

    def end(self, ours: StepRecord) -> None:
        """All has come; `ours`: what else the plan's step was."""
        of_tensors = [*self._gradients.errors(), *self._state.errors()]
        comparison = self._comparer.compare(ours, self._one, of_tensors)
        if not comparison.passed and all(step.passed for step in self._steps):
            self._causes = diagnose(comparison, ours, self._one, self._evidence, self._steps)
        self._steps.append(comparison)
        self._previous = dict(self._one.gradients)

    def found(self) -> ComparisonResult:
        """Of all steps so far."""
        return ComparisonResult(
            steps=self._steps, causes=self._causes, whole=self._whole, comparer=self._comparer
        )
