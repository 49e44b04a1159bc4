"""An evaluation of the plan compared with one device's: the mean of every metric, what each chunk adds to it, and the chunks' data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from meshloom.verify.between_steps.averages import AverageErrors
from meshloom.verify.between_steps.checks import BetweenSteps
from meshloom.verify.compared.compare_chunks import order_of_modules, place_of_owner
from meshloom.verify.reference.evaluation import EvaluatedChunk, evaluated_chunks
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.reruns import having, perturbed_parameters
from meshloom.verify.reference.step_records import StepRecord
from meshloom.verify.tolerances.evaluation_errors import (
    OF_LOWERED,
    OF_METRICS,
    EvaluationTolerances,
    metric_errors,
)
from meshloom.verify.tolerances.of_precision import rounds_partial_sums

MODE = "the mode of "  # before a module's name, in what changes
TRAINED = "whether something trains "  # before a parameter's


@dataclass(frozen=True, kw_only=True)
class PlanEvaluation:
    """metrics: of the first `batches`, None: of all. chunks: of all ranks. changed: names of parameters, buffers and
    modules' modes that are others after it. disagree: what ranks have of metrics, if it is not the same, a sentence each."""

    what: str
    metrics: Mapping[str, float]
    batches: int | None
    chunks: Sequence[EvaluatedChunk] = ()
    changed: Sequence[str] = ()
    disagree: Sequence[str] = ()


def compare_evaluation(
    ours: PlanEvaluation, reference: Reference, updates: int, averages: AverageErrors | None, record: StepRecord,
    *, unmeasured: float, lower: torch.dtype | None,
) -> BetweenSteps:  # fmt: skip
    """After `updates` updates. averages: what evaluations see in place of parameters. record: of one device's last step. unmeasured, lower: of the
    tolerances."""

    def moved(number: int) -> list[EvaluatedChunk]:
        whole = not rounds_partial_sums(reference.plan)
        with torch.no_grad(), perturbed_parameters(reference, number, whole=whole):
            return evaluated_chunks(reference, updates, ours.batches)

    with having(reference, averages.values) if averages else nullcontext():
        right = evaluated_chunks(reference, updates, ours.batches, digests=True)
        times = OF_METRICS if lower is None else OF_LOWERED
        tolerances = EvaluationTolerances(right=right, unmeasured=unmeasured, times=times, moved=moved)
        errors = metric_errors(ours.metrics, ours.chunks, tolerances, updates - 1)
    facts = [f"The evaluation changes {name}." for name in ours.changed]
    facts += [*ours.disagree, *list(wrong_data(ours.chunks, right))[:1]]
    return BetweenSteps(what=ours.what, errors=errors, facts=facts, first_module=_first_changed(ours, reference, record))  # fmt: skip


def wrong_data(ours: Sequence[EvaluatedChunk], right: Sequence[EvaluatedChunk]) -> Iterator[str]:
    """Chunks that are not those of one device, have other data, or draw from another seed, a sentence each."""
    here = {(each.batch, each.chunk): each for each in ours}
    there = {(each.batch, each.chunk): each for each in right}
    for batch, chunk in sorted({*here, *there}):
        what = f"Chunk {chunk} of batch {batch} of the evaluation"
        one, other = here.get((batch, chunk)), there.get((batch, chunk))
        if one is None or other is None:
            yield f"{what} is evaluated {'on one device' if one is None else 'under the plan'} alone."
        elif one.data != other.data:
            yield f"{what} has other data than on one device."
        elif one.seed != other.seed:
            yield f"{what} draws from another seed than on one device."


def _first_changed(ours: PlanEvaluation, reference: Reference, record: StepRecord) -> str | None:
    """The first module, in one device's order, of which the evaluation changes something."""
    owners = [
        name.removeprefix(MODE) if name.startswith(MODE) else name.removeprefix(TRAINED).rpartition(".")[0]
        for name in ours.changed
    ]
    order = order_of_modules(record, reference.plan)
    first = min(owners, key=lambda each: place_of_owner(f"{each}.", order), default=None)
    return None if first is None else first or "the whole model"
