"""What one device says of an evaluation of the plan: whether it differs, and then which metric of which chunk is the first, which module in
it, and why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from meshloom.verify.between_steps.averages import AverageErrors
from meshloom.verify.between_steps.checks import BetweenSteps, Cause, TensorError
from meshloom.verify.between_steps.evaluation_causes import (
    WrongMetrics,
    cause_in_module,
    cause_of_metrics,
    metric_error,
    numbers_of,
)
from meshloom.verify.compared.compare_chunks import order_of_modules, place_of_owner
from meshloom.verify.compared.compare_evaluation import (
    FoundMetric,
    PlacedMetric,
    PlanEvaluation,
    SeenMetric,
    cause_of_modes,
    cause_of_place,
    find_metric,
    pairs_of_outputs,
    place_metric,
    wrong_data,
    wrong_loans,
)
from meshloom.verify.reference.between_steps.evaluation import (
    EvaluatedChunk,
    MetricPlace,
    evaluated_chunks,
    means_of,
    watched_metric,
)
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.step_records import StepRecord
from meshloom.verify.tolerances.evaluation_errors import (
    EvaluationTolerances,
    metric_errors,
    output_distance,
    size_of_chunks,
)

MODE = "the mode of "  # before a module's name, in what changes
TRAINED = "whether something trains "  # before a parameter's
# error beyond which what a program has of a module is not its output, as metrics would show
_OTHER_VALUE = 0.1
_METRIC = "ml.Metric(update, compute) computes it of all samples, alike under every plan"
_PASSED = Cause(
    "between steps",
    "Evaluated once more, all metrics agree with one device's: what an evaluation finds depends on what ran before it.",
)


class ComparedEvaluation:
    """An evaluation of the plan after `updates` updates, compared with one device's. unmeasured, lower: of the tolerances. averages: what evaluations see in
    place of parameters. record: of one device's last step. undivided: tolerance of means on batches that are not divided; None: they may not fit in
    memory. checked: what is known without a repetition."""

    def __init__(
        self, ours: PlanEvaluation, reference: Reference, updates: int, averages: AverageErrors | None, record: StepRecord,
        *, unmeasured: float, lower: torch.dtype | None, undivided: float | None = None,
    ) -> None:  # fmt: skip
        self._ours, self._reference, self._updates, self._averages = ours, reference, updates, averages
        self._order = order_of_modules(record, reference.plan)
        self._found = FoundMetric(first=None)
        with self._seen():
            self._right = self._evaluated()
            self._tolerances = EvaluationTolerances(
                reference=reference,
                right=self._right,
                unmeasured=unmeasured,
                lower=lower,
                again=self._evaluated,
            )
            errors = metric_errors(ours.metrics, ours.chunks, self._tolerances, updates - 1)
            outputs = list(self._output_errors())
            notes = [] if undivided is None else self._undivided(undivided)
        self._wrong_outputs = [place for place, error in outputs if not error.passed]
        self._wrong = None if all(each.passed for each in errors) else self._wrong_metrics()
        self._data = next(wrong_data(ours.chunks, self._right), None)
        self._loan = next(wrong_loans(ours.lent), None)
        cause = self._loan[1] if self._loan else cause_of_metrics(self._wrong) if self._wrong else None
        cause = cause or self._stays()
        facts = [*(f"The evaluation changes {name}." for name in ours.changed), *ours.disagree]
        self.checked = BetweenSteps(
            what=ours.what, errors=[*errors, *(error for _, error in outputs)], causes=[cause] if cause else [],
            facts=[*facts, self._data.sentence] if self._data else facts, notes=notes,
        )  # fmt: skip

    def find(self, chunks: Sequence[EvaluatedChunk], again: Mapping[str, float]) -> FoundMetric:
        """Of all chunks of the evaluation, which the plan has repeated, and its metrics then."""
        allowed = self._wrong.allowed_of_chunks() if self._wrong else {}
        if allowed:
            self._found = find_metric(chunks, self._right, allowed)
            means = means_of(self._right)
            same = all(
                metric_error(again.get(name, math.nan), means[name]) <= allowed[name] for name in allowed
            )
            if self._found.first is None and same and self._found.causes[0].kind != "data":
                self._found = replace(self._found, causes=[_PASSED])
        elif self._data:
            self._found = FoundMetric(first=None, causes=[self._data])
        if self._found.first is None and self._wrong_outputs and _PASSED not in self._found.causes:
            self._found = self._at(self._wrong_outputs[0], chunks)
        return self._found

    def explain(self, seen: Sequence[SeenMetric], tolerance: float) -> BetweenSteps:
        """All that is known. seen: by the ranks that compute the metric that was found. tolerance: of modules' outputs."""
        found, reference = self._found, self._reference
        placed = PlacedMetric()
        if found.first is not None and seen:
            tensors = self._tensors()
            with self._seen():
                right = watched_metric(reference, self._updates, found.first)
            placed = place_metric(seen, right, tensors, tolerance)
        observed = bool(seen) and all(each.outputs or each.values for each in seen)
        place, modes = cause_of_place(found, placed, observed=observed), cause_of_modes(placed)
        facts = [each for each in found.causes if each.kind == "data"]
        numbers = [*self.checked.causes]
        if self._wrong is not None and not facts and not numbers and placed.module:
            numbers += filter(None, [cause_in_module(self._wrong, placed.module, placed.tensor)])
        weights = [*found.causes] if placed.module is None else []
        rest = [] if facts or numbers else weights or [place]
        return replace(
            self.checked, causes=[each for each in (*facts, modes, *numbers, *rest) if each],
            first_module=None if facts else placed.module or self._first_lent() or self._first_changed(),
        )  # fmt: skip

    def _seen(self) -> AbstractContextManager[None]:
        """A context in which one device has the parameters that evaluations see."""
        return self._averages.in_place_of(self._reference.parameters) if self._averages else nullcontext()

    def _evaluated(self) -> list[EvaluatedChunk]:
        places = {(place.batch, place.chunk) for place, _ in self._ours.watched}
        return evaluated_chunks(
            self._reference, self._updates, self._ours.batches, digests=True, watch=places
        )

    def _undivided(self, tolerance: float) -> list[str]:
        """Whether one device has the same means of plain functions on batches that are not divided; a line each, or one."""
        means, plain = (
            means_of(self._right),
            [name for name in self._right[0].sums if name not in self._right[0].returned],
        )
        if self._reference.plan.num_chunks == 1 or not plain:
            return []
        try:
            found = evaluated_chunks(self._reference, self._updates, self._ours.batches, undivided=True)
        except (
            Exception
        ) as error:  # of the job's own code, which gets no such batch under the plan, or of memory
            return [
                f"metrics on whole batches: not compared, {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            ]
        whole, draws = means_of(found), {name for each in (*found, *self._right) for name in each.draws}
        others = [name for name in plain if not metric_error(whole[name], means[name]) <= tolerance]
        return [
            f"{name} is {means[name]:.6g} in the mean over chunks and {whole[name]:.6g} in that over whole batches, "
            + ("because it draws" if name in draws else f"because it is no mean over samples. {_METRIC}")
            for name in others
        ] or [f"metrics on whole batches: one device has the same of {', '.join(plain)}"]

    def _tensors(self) -> set[str]:
        model = self._reference.model
        return {name for name, _ in (*model.named_parameters(), *model.named_buffers())}

    def _wrong_metrics(self) -> WrongMetrics:
        ours, right, tolerances = self._ours, numbers_of(self._right), self._tolerances
        sizes: dict[str | MetricPlace, float] = {}
        allowed: dict[str | MetricPlace, float] = {}
        here: dict[str | MetricPlace, float] = {**numbers_of(ours.chunks), **ours.metrics}
        for key in right:
            name = key if isinstance(key, str) else key.metric
            sizes[key] = 0.0 if isinstance(key, str) else size_of_chunks(self._right, name)
            of = tolerances.of_mean if isinstance(key, str) else tolerances.of_chunk
            allowed[key] = of(name, metric_error(here.get(key, math.nan), right[key], sizes[key]))
        return WrongMetrics(
            ours=here, right=right, allowed=allowed, sizes=sizes, reference=self._reference, updates=self._updates, batches=ours.batches,
            averages=self._averages,
        )  # fmt: skip

    def _output_errors(self) -> Iterator[tuple[MetricPlace, TensorError]]:
        """In every metric that is watched the output that is farthest off for its tolerance."""
        right = {(each.batch, each.chunk): each.outputs for each in self._right}
        tensors = self._tensors()
        for place, seen in self._ours.watched:
            outputs = right.get((place.batch, place.chunk), {}).get(place.metric, ())
            worst: TensorError | None = None
            for number, here, there in pairs_of_outputs(seen, outputs):
                error = output_distance(here, there)
                if (seen.values and error > _OTHER_VALUE) or there.name in tensors:
                    continue
                what = f"{there.name or 'the model'} in {place.metric} of chunk {place.chunk} of batch {place.batch}"
                found = TensorError(
                    name=f"output of {what}", kind="metric", step=self._updates - 1, error=error,
                    tolerance=self._tolerances.of_output(place, number, error),
                )  # fmt: skip
                if worst is None or found.error * worst.tolerance > worst.error * found.tolerance:
                    worst = found
            if worst is not None:
                yield place, worst

    def _at(self, place: MetricPlace, chunks: Sequence[EvaluatedChunk]) -> FoundMetric:
        """Where outputs differ and the metric agrees."""
        pair = [
            next((each.sums[place.metric] for each in side if (each.batch, each.chunk) == (place.batch, place.chunk)), (math.nan, 1.0))
            for side in (chunks, self._right)
        ]  # fmt: skip
        ours, right = (value / weight if weight else math.nan for value, weight in pair)
        return FoundMetric(first=place, pair=(ours, right))

    def _stays(self) -> Cause | None:
        changed = [each for each in self._ours.changed if each in self._reference.parameters]
        if self._averages is None or not changed:
            return None
        what = f"The evaluation changes {changed[0]}{f' and {len(changed) - 1} more parameters' if changed[1:] else ''}"
        return Cause(
            "averages",
            f"{what}: averages stay in place of them, or what other ranks have put back does not come.",
        )

    def _first_lent(self) -> str | None:
        return (self._loan[0].rpartition(".")[0] or "the whole model") if self._loan else None

    def _first_changed(self) -> str | None:
        owners = [
            name.removeprefix(MODE) if name.startswith(MODE) else name.removeprefix(TRAINED).rpartition(".")[0] for name in self._ours.changed
        ]  # fmt: skip
        first = min(owners, key=lambda each: place_of_owner(f"{each}.", self._order), default=None)
        return None if first is None else first or "the whole model"
