"""An evaluation of the plan compared with one device's: the mean of every metric, what each chunk adds to it, and the chunks' data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from meshloom.verify.between_steps.averages import AverageErrors
from meshloom.verify.between_steps.checks import BetweenSteps
from meshloom.verify.compared.compare_chunks import order_of_modules, place_of_owner
from meshloom.verify.reference.between_steps.evaluation import EvaluatedChunk, evaluated_chunks, means_of
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.step_records import StepRecord
from meshloom.verify.tolerances.evaluation_errors import EvaluationTolerances, metric_error, metric_errors

MODE = "the mode of "  # before a module's name, in what changes
TRAINED = "whether something trains "  # before a parameter's
_METRIC = "ml.Metric(update, compute) computes it of all samples, alike under every plan"


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
    *, unmeasured: float, lower: torch.dtype | None, undivided: float | None,
) -> BetweenSteps:  # fmt: skip
    """After `updates` updates. averages: what evaluations see in place of parameters. record: of one device's last step. unmeasured, lower: of the
    tolerances. undivided: tolerance of means on batches that are not divided; None: they may not fit in memory."""

    def evaluated() -> list[EvaluatedChunk]:
        return evaluated_chunks(reference, updates, ours.batches, digests=True)

    with averages.in_place_of(reference.parameters) if averages else nullcontext():
        right = evaluated()
        tolerances = EvaluationTolerances(reference=reference, right=right, unmeasured=unmeasured, lower=lower, again=evaluated)  # fmt: skip
        errors = metric_errors(ours.metrics, ours.chunks, tolerances, updates - 1)
        notes = [] if undivided is None else _undivided(ours, reference, updates, right, undivided)
    facts = [f"The evaluation changes {name}." for name in ours.changed]
    facts += [*ours.disagree, *list(wrong_data(ours.chunks, right))[:1]]
    return BetweenSteps(
        what=ours.what, errors=errors, facts=facts, first_module=_first_changed(ours, reference, record), notes=notes,
    )  # fmt: skip


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


def _undivided(
    ours: PlanEvaluation,
    reference: Reference,
    updates: int,
    right: Sequence[EvaluatedChunk],
    tolerance: float,
) -> list[str]:
    """Whether one device has the same means of plain functions on batches that are not divided; a line each, or one."""
    means, plain = means_of(right), [name for name in right[0].sums if name not in right[0].returned]
    if reference.plan.num_chunks == 1 or not plain:
        return []
    try:
        found = evaluated_chunks(reference, updates, ours.batches, undivided=True)
    except Exception as error:  # of the job's own code, which gets no such batch under the plan, or of memory
        said = str(error).splitlines()[0] if str(error) else ""
        return [f"metrics on whole batches: not compared, {type(error).__name__}: {said}"]
    whole, draws = means_of(found), {name for each in (*found, *right) for name in each.draws}
    others = [name for name in plain if not metric_error(whole[name], means[name]) <= tolerance]
    return [
        f"{name} is {means[name]:.6g} in the mean over chunks and {whole[name]:.6g} in that over whole batches, "
        + ("because it draws" if name in draws else f"because it is no mean over samples. {_METRIC}")
        for name in others
    ] or [f"metrics on whole batches: one device has the same of {', '.join(plain)}"]


def _first_changed(ours: PlanEvaluation, reference: Reference, record: StepRecord) -> str | None:
    """The first module, in one device's order, of which the evaluation changes something."""
    owners = [
        name.removeprefix(MODE) if name.startswith(MODE) else name.removeprefix(TRAINED).rpartition(".")[0]
        for name in ours.changed
    ]
    order = order_of_modules(record, reference.plan)
    first = min(owners, key=lambda each: place_of_owner(f"{each}.", order), default=None)
    return None if first is None else first or "the whole model"
