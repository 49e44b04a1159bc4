"""Whole records of steps, as tests like to look at them, and their way through what compares one tensor at a
time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from meshloom.verify.compare import Comparer, Comparison, GradientErrors, StateErrors
from meshloom.verify.comparison_run import ComparisonResult, ComparisonRun
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.reruns import full_evidence, initial_evidence, whole_batch
from meshloom.verify.reference.step_records import StepRecord


@dataclass(frozen=True, kw_only=True)
class WholeRecord(StepRecord):
    """A step with all its tensors: gradients are whole, too; buffers and parameters are those after it."""

    buffers: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]


def step_of(reference: Reference, *, look: bool = False) -> WholeRecord:
    """The reference's next step. look: run its chunks again in between, in all ways that there are."""
    reference.run()
    if look:
        with whole_batch(reference):
            pass
        full_evidence(reference, initial_evidence(reference, {}))
    gradients = {name: None if each is None else each.clone() for name, each in reference.gradients.items()}
    record = vars(reference.update())
    buffers = {name: each.clone() for name, each in reference.model.named_buffers()}
    parameters = {name: each.detach().clone() for name, each in reference.model.named_parameters()}
    return WholeRecord(**{**record, "gradients": gradients}, buffers=buffers, parameters=parameters)


def hold_against(reference: Reference, records: Iterable[WholeRecord]) -> ComparisonResult:
    """Each record against the reference's next step."""
    comparison = ComparisonRun(reference)
    for ours in records:
        comparison.begin()
        for name, gradient in ours.gradients.items():
            comparison.add_gradient(name, gradient)
        comparison.update()
        for name, each in {**ours.parameters, **ours.buffers}.items():
            comparison.add_state(name, each)
        comparison.end(ours)
    return comparison.result()


def compare_records(
    comparer: Comparer, ours: WholeRecord, one: WholeRecord, before: Mapping[str, Tensor]
) -> Comparison:
    """One step of both sides, whose parameters were `before`."""
    tolerance = comparer.tolerance(one.casts)
    gradients = GradientErrors(one.gradients, one.step, tolerance)
    for name, each in ours.gradients.items():
        gradients.compare(name, each)
    updated = comparer.tolerance(updated=True)
    state = StateErrors(
        one.parameters, before, one.buffers, step=one.step, tolerance=tolerance, updated=updated
    )
    for name, each in {**ours.parameters, **ours.buffers}.items():
        state.compare(name, each)
    return comparer.compare(ours, one, [*gradients.errors(), *state.errors()])
