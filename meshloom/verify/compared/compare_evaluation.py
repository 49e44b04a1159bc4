"""An evaluation of the plan compared with one device's: the mean of every metric.

It may be off by 32 units in the last place, or by what rounding does: twice the most that it moves on one device where parameters are perturbed by some units,
several times, as one number may stay where it is by chance; four times, where operators are divided and cast. Equal values are cast to equal ones
wherever operators run on whole chunks, so there units are those of the parameters' precision, whatever the metric is computed in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from meshloom.verify.between_steps.checks import BetweenSteps, TensorError, metric_error
from meshloom.verify.compared.compare_chunks import module_of_names
from meshloom.verify.reference.evaluation import evaluate
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.reruns import having, perturbed_parameters, rounds_partial_sums
from meshloom.verify.reference.step_records import StepRecord

_DRAWS = 6  # of perturbed parameters
_OF_METRICS, _OF_LOWERED = 2, 4  # times what they move


@dataclass(frozen=True, kw_only=True)
class PlanEvaluation:
    """metrics: of the first `batches`, None: of all. changed: names of parameters, buffers and
    attributes that are others after it. disagree: what ranks have of metrics, if it is not the same, a sentence each."""

    what: str
    metrics: Mapping[str, float]
    batches: int | None
    changed: Sequence[str] = ()
    disagree: Sequence[str] = ()


def compare_evaluation(
    ours: PlanEvaluation, reference: Reference, updates: int, record: StepRecord, *, unmeasured: float, lower: torch.dtype | None
) -> BetweenSteps:  # fmt: skip
    """After `updates` updates; evaluations see averages in place of parameters. record: of one device's last step. unmeasured: of numbers,
    relative to their size. lower: what partial sums are rounded to."""
    with having(reference, reference.averages):
        right = evaluate(reference, updates, ours.batches)
        errors = {name: metric_error(ours.metrics.get(name, math.nan), each) for name, each in right.items()}
        allowed = dict.fromkeys(right, unmeasured)
        if any(unmeasured < each < math.inf for each in errors.values()):
            times = _OF_METRICS if lower is None else _OF_LOWERED
            whole = not rounds_partial_sums(reference.plan)
            for number in range(_DRAWS):
                with torch.no_grad(), perturbed_parameters(reference, number, whole=whole):
                    moved = evaluate(reference, updates, ours.batches)
                for name, value in right.items():
                    allowed[name] = max(allowed[name], times * metric_error(moved[name], value))
    of_metric = partial(TensorError, kind="metric", step=updates - 1)
    found = [
        of_metric(name=name, error=error, tolerance=allowed[name], moved=allowed[name] > unmeasured)
        for name, error in errors.items()
    ]
    facts = [*(f"The evaluation changes {name}." for name in ours.changed), *ours.disagree]
    module = module_of_names(ours.changed, record, reference.plan)
    return BetweenSteps(what=ours.what, errors=found, facts=facts, first_module=module)
