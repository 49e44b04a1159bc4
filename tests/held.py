"""Whole records of steps, as tests like to look at them, and their way through what compares one tensor at a
time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshloom.verify.compared.compare import Comparer, Comparison
from meshloom.verify.compared.whole_batch import whole_batch
from meshloom.verify.comparison_run import ComparisonRun
from meshloom.verify.findings import Report
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.reruns import chunk_by_chunk, with_equal_draws
from meshloom.verify.reference.step_records import StepRecord
from meshloom.verify.tolerances.gradient_errors import GradientErrors
from meshloom.verify.tolerances.of_precision import most_tolerated, unmeasured_through
from meshloom.verify.tolerances.state_errors import StateErrors


@dataclass(frozen=True, kw_only=True)
class WholeRecord(StepRecord):
    """A step with all its tensors: gradients are whole, too; buffers and parameters are those after it."""

    buffers: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]


def step_of(reference: Reference, *, look: bool = False) -> WholeRecord:
    """The reference's next step. look: run its chunks again in between, in all ways that there are."""
    reference.run()
    if look:
        whole_batch(reference)
        chunk_by_chunk(reference)
        with_equal_draws(reference)
    gradients = {name: None if each is None else each.clone() for name, each in reference.gradients.items()}
    record = vars(reference.update())
    buffers = {name: each.clone() for name, each in reference.model.named_buffers()}
    parameters = {name: each.detach().clone() for name, each in reference.model.named_parameters()}
    return WholeRecord(**{**record, "gradients": gradients}, buffers=buffers, parameters=parameters)


def hold_against(reference: Reference, records: Iterable[WholeRecord]) -> Report:
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
    comparer.note(one.casts)
    gradients = GradientErrors(one.gradients, one.step)
    for name, each in ours.gradients.items():
        gradients.compare(name, each)
    optimizers = {cast.place for cast in one.casts if cast.in_optimizer}
    lower = most_tolerated(torch.bfloat16) if optimizers else 0.0
    updates = dict.fromkeys(one.parameters, max(lower, unmeasured_through(comparer.precision)))
    state = StateErrors(
        one.parameters, before, one.buffers, changed=dict.fromkeys(one.buffers, 0.0), step=one.step, updates=updates,
        partial=comparer.partial,
    )  # fmt: skip
    for name, each in {**ours.parameters, **ours.buffers}.items():
        state.compare(name, each)
    return comparer.compare(ours, one, [*gradients.errors(), *state.errors()])
