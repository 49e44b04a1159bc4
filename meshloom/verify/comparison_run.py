"""Compares the steps of a plan with the reference, tensor by tensor as they arrive, and looks for the factor of the
first difference: in this process, or in one of its own (`apart.py`).

The calls of a step, in order; of tensors only numbers are kept:

    begin           the reference computes its gradients
    add_gradient    each of the plan's is compared, and replaces the reference's if they agree
    update          the reference updates
    add_state       each parameter and buffer of the plan is compared, and parameters that agree replace the reference's
    end             the rest of the step's record, and the verdict
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshloom.core.job import Job
from meshloom.core.moments.numerics import numeric_settings
from meshloom.core.plan import Plan
from meshloom.verify.between_steps.checks import (
    BetweenSteps,
    DifferingTensor,
    Kind,
    TensorError,
    compared_with,
)
from meshloom.verify.between_steps.saved_check import check_saved
from meshloom.verify.compared.compare import Comparer, Comparison, name_of
from meshloom.verify.compared.compare_evaluation import PlanEvaluation, compare_evaluation
from meshloom.verify.compared.whole_batch import WholeBatch, compare_whole_batch
from meshloom.verify.factors import Wrong, of_gradients, of_norm, of_updates
from meshloom.verify.findings import Report
from meshloom.verify.reference.float64_blocks import Subsampled, subsample
from meshloom.verify.reference.reference import Reference, changed_buffers, replace_value
from meshloom.verify.reference.reference_optimizers import needs_closure
from meshloom.verify.reference.reruns import (
    ENLARGED,
    backward_effect,
    chunk_by_chunk,
    loss_effect,
    outputs_effect,
    rounding_effect,
    rounds_partial_sums,
    travel_effect,
    with_equal_draws,
)
from meshloom.verify.reference.step_records import StepRecord
from meshloom.verify.stage_outputs import Values, first_wrong_module
from meshloom.verify.tolerances.gradient_errors import GradientErrors, Measure
from meshloom.verify.tolerances.of_precision import (
    most_tolerated,
    sums_in_other_orders,
    unmeasured,
    unmeasured_through,
)
from meshloom.verify.tolerances.state_errors import StateErrors, buffer_sizes, update_tolerances


def compare_here(job: Job, *given: Any) -> ComparisonRun:
    """In this process. given: what else a `Reference` takes."""
    return ComparisonRun(Reference(job, *given))


class ComparisonRun:
    """Compares a plan's steps with those of `reference`, which it runs. Tensors are not kept."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        lowered = reference.updated.dtype
        precision = torch.float32 if lowered else reference.precision
        self._comparer = Comparer(
            plan=reference.plan, precision=precision, autocast=reference.autocast, lowered=lowered
        )
        self._steps: list[Comparison] = []
        self._explained = ""  # by which factor
        self._differing: DifferingTensor | None = None  # the first
        self._whole: WholeBatch | None = None
        self._averages: list[TensorError] = []  # in this step
        self._before: Subsampled = {}  # one device's gradients of the step before
        self._changed: frozenset[str] = frozenset()  # buffers, in this step
        self._buffer_effects: Mapping[str, float] = {}
        self._updates: Mapping[str, float] = {}  # tolerances of the newest
        self._gradients: GradientErrors
        self._state: StateErrors
        self._held: Mapping[str, Tensor]  # parameters, as they are updated, and buffers
        self._reference_record: StepRecord
        self._wrong: dict[Kind, list[Wrong]] = {}  # in this step

    def begin(self) -> None:
        """Begin a step: forward and backward of the reference."""
        reference = self.reference
        reference.run()
        self._comparer.note(reference.casts)
        if all(step.skipped for step in self._steps) and not reference.scale.overflowed:
            # the first with an update; the whole batch may not fit in memory, which may be why there are microbatches
            with suppress(torch.OutOfMemoryError):
                self._whole = compare_whole_batch(reference, self._comparer.modules)
        self._changed = frozenset(changed_buffers(reference))
        # after a difference the two have different parameters
        measure = self._measured if self.agrees() else None
        self._gradients = _errors_of(reference, self._comparer, measure)
        self._wrong, self._averages = {"gradient": [], "update": []}, []

    def _measured(self) -> Mapping[str, float]:
        """How far rounding moves the gradients of this step; and once, how far buffers, relative to their size."""
        of_gradients, of_buffers = rounding_effect(self.reference)
        sizes = buffer_sizes(dict(self.reference.model.named_buffers()), self._changed)
        self._buffer_effects = {
            name: max(effect / sizes[name], self._buffer_effects.get(name, 0.0))
            for name, effect in of_buffers.items()
            if sizes[name]
        }
        return of_gradients

    def agrees(self) -> bool:
        """Whether all steps so far agree."""
        return all(step.passed for step in self._steps)

    def adopt(self, name: str, ours: Tensor) -> None:
        """Once something differs: one device has this value of a parameter or buffer."""
        replace_value(self.reference, name, ours)

    def place(self, of_chunks: Mapping[int, Sequence[Values]]) -> str | None:
        """Then: the first module whose output differs; of `stage_outputs.py`."""
        return first_wrong_module(self.reference, of_chunks, self.of_outputs)

    @property
    def of_outputs(self) -> float:
        """The tolerance of a module's output in a forward on equal parameters."""
        lower = self._comparer.partial or self._comparer.autocast or self._comparer.lowered
        return max(unmeasured_through(self._comparer.precision), most_tolerated(lower))

    def _gradient_errors(self) -> list[TensorError]:
        """Of the step; none if gradients overflow: they are not finite on either side, each in its own elements."""
        return [] if self.reference.scale.overflowed else self._gradients.errors()

    def add_gradient(self, name: str, ours: Tensor | None) -> None:
        """Compare the plan's next averaged gradient; None: unused."""
        if self.reference.scale.overflowed:
            return
        found = self._gradients.compare(name, ours)
        if found.passed:
            self.reference.replace_gradient(name, ours)
        else:
            self._differs([found], ours, self.reference.gradients.get(name))

    def update(self) -> None:
        """Update the reference after all gradients have arrived. If some differ, look for the factor first,
        while the parameters are still those of the gradients."""
        reference, comparer = self.reference, self._comparer
        if self.agrees() and (wrong := self._wrong["gradient"]):
            failed = [each for each in self._gradient_errors() if not (each.passed or each.noise)]
            if len(failed) == len(wrong):
                chunks, alike = chunk_by_chunk(reference), with_equal_draws(reference)
                self._explained = of_gradients(wrong, reference.plan, chunks, self._before, alike)
        self._reference_record = reference.update()
        comparer.note(self._reference_record.casts)
        buffers = dict(reference.model.named_buffers())
        self._held = {**buffers, **reference.updated.all}
        names = {id(each): name for name, each in reference.updated.all.items()}
        self._updates = update_tolerances(reference.optimizers, comparer.casts, names, comparer.precision)
        changed = {name: self._buffer_effects.get(name, 0.0) for name in self._changed}
        self._state = StateErrors(
            reference.updated.all, reference.before, buffers, changed=changed, step=reference.step,
            updates=self._updates, partial=comparer.partial, merged=comparer.lowered if reference.plan.num_chunks > 1 else None
        )  # fmt: skip

    def add_state(self, name: str, ours: Tensor) -> None:
        """Compare the plan's next parameter or buffer after the step."""
        compared = self._state.compare(name, ours)
        wrong = [error for error in compared if not error.passed]
        if wrong:
            self._differs(wrong, ours, self._held[name], self.reference.before.get(name))
        elif compared:
            replace_value(self.reference, name, ours)

    def _differs(
        self,
        errors: Sequence[TensorError],
        ours: Tensor | None,
        right: Tensor | None,
        before: Tensor | None = None,
    ) -> None:
        """Keep the first tensor that differs, and what is needed to look for a factor. errors: of a parameter, the last is that of its update.
        before: a parameter before its update."""
        if ours is None or right is None or ours.shape != right.shape:
            return
        if self._differing is None:
            first, (plan, other) = errors[0], (each.detach().to_dense().clone() for each in (ours, right))
            self._differing = DifferingTensor(
                name=first.name, kind=first.kind, step=first.step, plan=plan, one_device=other
            )
        error, one, other = errors[-1], subsample(ours), subsample(right)
        if error.kind == "gradient" and not error.noise:
            self._wrong["gradient"].append(
                Wrong(name=error.name, ours=one, right=other, tolerance=error.tolerance)
            )
        elif before is not None:
            start = subsample(before)
            found = Wrong(name=error.name, ours=one - start, right=other - start, tolerance=error.tolerance, before=start)  # fmt: skip
            self._wrong["update"].append(found)

    def go_to(self, step: int) -> None:
        """The next step is the one of this number."""
        self.reference.go_to(step)

    def check_metrics(self, ours: PlanEvaluation, updates: int) -> BetweenSteps:
        """Compare the plan's metrics after so many updates."""
        return compare_evaluation(
            ours, self.reference, updates, self._reference_record, unmeasured=unmeasured(self._comparer.precision), lower=self._comparer.partial
        )  # fmt: skip

    def step_schedulers(self, metrics: Mapping[str, float]) -> None:
        """Step one device's schedulers that go by a metric, here and not by what steps the plan's. metrics: the plan's, so that rounding cannot make the
        two decide differently."""
        evaluate = self.reference.job.evaluate
        if evaluate is not None and (given := evaluate.scheduler) is not None:
            value = metrics[given.metric]
            for each in self.reference.by_metric:
                each.step(value if given.of is None else float(given.of(value)))

    def check_saved(self, path: Path, what: str) -> BetweenSteps:
        """Compare the checkpoint in `path`."""
        return check_saved(path, what, self.reference, self._update_tolerance, self.of_outputs)

    def _update_tolerance(self, name: str) -> float:
        return self._updates.get(name, unmeasured_through(self._comparer.precision))

    def average(self) -> None:
        """After `add_state` of everything."""
        self.reference.average()

    def add_average(self, name: str, ours: Tensor) -> None:
        """Compare the plan's average of a parameter, or any other tensor in its place."""
        if (right := self.reference.averages.get(name)) is not None:
            allowed = self._update_tolerance(name)
            self._averages.append(
                compared_with(name, ours, right, self.reference.step, allowed, kind="average")
            )

    def end(self, ours: StepRecord) -> None:
        """Compare the rest of the step. ours: the plan's record, without gradients."""
        of_tensors = [*self._gradient_errors(), *self._state.errors(), *self._averages]
        effect = partial(loss_effect, self.reference)
        comparison = self._comparer.compare(
            ours, self._reference_record, of_tensors, grows=self._gradients.grows, loss_effect=effect
        )
        if not comparison.passed and self.agrees() and not comparison.failed("gradient"):
            self._explained = self._factor_behind_gradients(comparison, ours.gradient_norm)
        self._steps.append(comparison)
        self._before = self._reference_record.gradients

    def _factor_behind_gradients(self, comparison: Comparison, norm: float | None) -> str:
        """Of what differs although gradients agree. norm: the plan's."""
        right, limit = self._reference_record.gradient_norm, self.reference.job.clip_grad_norm
        wrong = self._wrong["update"]
        if norm and right and comparison.failed("norm"):
            tolerance = next(each.tolerance for each in comparison.errors if each.kind == "norm")
            return of_norm(norm, right, tolerance, self._gradients.norms, self.reference.plan.dp)
        if len(wrong) < len(comparison.failed("update")):
            return ""
        return of_updates(wrong, right / limit if right and limit else 1.0)

    def result(self) -> Report:
        """Of all steps so far; what ran the plan is not known here."""
        comparer, dtype = self._comparer, self.reference.dtype
        return Report(
            plan=str(comparer.plan), precision=name_of(comparer.precision), steps=self._steps, casts=comparer.casts, whole=self._whole,
            explained=self._explained, autocast=comparer.under(dtype), settings=numeric_settings(), differing=self._differing,
            notes=[] if self.agrees() or comparer.precision == torch.float64 else _notes_on_closures(self.reference)
        )  # fmt: skip


def _notes_on_closures(reference: Reference) -> list[str]:
    names = [type(each).__name__ for each in reference.optimizers if needs_closure(each)]
    return [
        f"{each} evaluates the loss itself, and rounding grows in its directions: --dtype float64 tells a mistake from it"
        for each in names
    ]


def _errors_of(reference: Reference, comparer: Comparer, measure: Measure | None) -> GradientErrors:
    """Of the gradients of the reference's step. measure: its rerun with perturbed parameters; None: nothing is measured."""
    plan, lowered = reference.plan, comparer.lowered
    # what gradients, or the parts that they are sums of, are rounded to where one device does it in another order
    rounded = lowered if lowered and sums_in_other_orders(plan) else None
    if rounds_partial_sums(plan):
        rounded = lowered or comparer.autocast
    travels = travels_at(plan, reference.precision)
    half_units = sum_roundings(plan.num_chunks) if lowered and plan.pp > 1 else 1.0
    of_outputs = [partial(outputs_effect, reference, times) for times in (1, ENLARGED)]
    of_backward = partial(backward_effect, reference) if rounds_partial_sums(plan) else None
    return GradientErrors(
        reference.gradients, reference.step, precision=comparer.precision if lowered else None,
        partial_sums=half_units * torch.finfo(rounded).eps / 2 if rounded else 0.0, travels=travels,
        measures=[measure, *of_outputs] if measure else [], of_terms=of_backward if measure else None,
        measure_travels=partial(travel_effect, reference, travels)
    )  # fmt: skip


def sum_roundings(num_chunks: int) -> float:
    """Half units of the sum by which two orders of adding up that many gradients may differ, each addition rounded.

    A rounding is off by 0.41 half units on average. Where partial sums grow evenly, n - 1 of them in a row are off by 0.41 * sqrt(n / 3)
    half units of the last sum, and two orders by sqrt(2) times that, and a half for the additions of a parameter's several uses:
    0.73, 0.92, 1.1, 1.4 half units were measured for 2, 4, 8, 16 chunks. This is about twice that.

    >>> [round(sum_roundings(n), 1) for n in (2, 4, 16, 64)]
    [1.7, 2.0, 3.0, 5.0]
    """
    return 1 + math.sqrt(num_chunks) / 2


def travels_at(plan: Plan, precision: torch.dtype) -> float:
    """How far what gradients travel as may round their sum, as a share of it: each replica's gradient by half a unit, and so each sum on the
    way. 0: they travel as they are. precision: of the parameters."""
    if plan.reduce != "bf16" or precision not in (torch.float32, torch.float16):
        return 0.0
    return plan.dp * torch.finfo(torch.bfloat16).eps / 2
