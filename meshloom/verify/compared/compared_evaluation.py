"""What one device says of an evaluation of the plan: whether it differs, and then which metric of which chunk is the first, which module in
it, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshloom.verify.between_steps.averages import AverageErrors
from meshloom.verify.between_steps.checks import BetweenSteps
from meshloom.verify.between_steps.evaluation_causes import cause_in_module, metric_error
from meshloom.verify.between_steps.evaluation_check import MODE, PlanEvaluation, check_metrics
from meshloom.verify.compared.compare_chunks import order_of_modules, place_of_owner
from meshloom.verify.compared.compare_evaluation import (
    FoundMetric,
    PlacedMetric,
    SeenMetric,
    cause_of_modes,
    cause_of_place,
    find_metric,
    place_metric,
)
from meshloom.verify.reference.between_steps.evaluation import (
    EvaluatedChunk,
    evaluated_chunks,
    watched_metric,
)
from meshloom.verify.reference.mistakes import Cause
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.step_records import StepRecord

_PASSED = Cause(
    "between steps",
    "Evaluated once more, all metrics agree with one device's: what an evaluation finds depends on what ran before it.",
)


class ComparedEvaluation:
    """An evaluation of the plan after `updates` updates, compared with one device's. tolerance: of metrics. averages: what evaluations see in place
    of parameters. record: of one device's last step. checked: what is known without a repetition."""

    def __init__(
        self, ours: PlanEvaluation, reference: Reference, updates: int, tolerance: float, averages: AverageErrors | None, record: StepRecord,
    ) -> None:  # fmt: skip
        self.checked, self._wrong = check_metrics(ours, reference, updates, tolerance, averages)
        self._changed, self._order = ours.changed, order_of_modules(record, reference.plan)
        self._found = FoundMetric(first=None)

    def find(self, chunks: Sequence[EvaluatedChunk], again: Mapping[str, float]) -> FoundMetric:
        """Of all chunks of the evaluation, which the plan has repeated, and its metrics then."""
        wrong = self._wrong
        if wrong is not None:
            with wrong.seen():
                right = evaluated_chunks(wrong.reference, wrong.updates, wrong.batches, digests=True)
            failed = {each.name: each.tolerance for each in self.checked.errors if not each.passed}
            self._found = find_metric(chunks, right, failed)
            same = all(
                metric_error(again.get(name, math.nan), wrong.right[name]) <= failed[name] for name in failed
            )
            if self._found.first is None and same:
                self._found = replace(self._found, causes=[_PASSED])
        return self._found

    def explain(self, seen: Sequence[SeenMetric], tolerance: float) -> BetweenSteps:
        """All that is known. seen: by the ranks that compute the metric that was found. tolerance: of modules' outputs."""
        found, wrong = self._found, self._wrong
        placed = PlacedMetric()
        if wrong is not None and found.first is not None and seen:
            model = wrong.reference.model
            tensors = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
            with wrong.seen():
                right = watched_metric(wrong.reference, wrong.updates, found.first)
            placed = place_metric(seen, right, tensors, tolerance)
        observed = bool(seen) and all(each.outputs for each in seen)
        place, modes = cause_of_place(found, placed, observed=observed), cause_of_modes(placed)
        facts = [each for each in found.causes if each.kind == "data"]
        numbers = [*self.checked.causes]
        if wrong is not None and not facts and not numbers and placed.module:
            numbers += filter(None, [cause_in_module(wrong, placed.module, placed.tensor)])
        weights = [*found.causes] if placed.module is None else []
        rest = [] if facts or numbers else weights or [place]
        return replace(
            self.checked, causes=[each for each in (*facts, modes, *numbers, *rest) if each],
            first_module=None if facts else placed.module or self._first_changed(),
        )  # fmt: skip

    def _first_changed(self) -> str | None:
        owners = [
            name.removeprefix(MODE) if name.startswith(MODE) else name.rpartition(".")[0] for name in self._changed
        ]  # fmt: skip
        first = min(owners, key=lambda each: place_of_owner(f"{each}.", self._order), default=None)
        return None if first is None else first or "the whole model"
