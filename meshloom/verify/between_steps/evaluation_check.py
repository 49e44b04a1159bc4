"""An evaluation under the plan: its metrics against those of one device, and that it changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from meshloom.comm.objects import collect
from meshloom.comm.steps import Steps
from meshloom.parameters.digest import digest
from meshloom.replica.replica import Replica
from meshloom.replica.replica_state import replicated_state
from meshloom.train.trainer import Trainer
from meshloom.verify.between_steps.averages import AverageErrors
from meshloom.verify.between_steps.checks import BetweenSteps, TensorError
from meshloom.verify.between_steps.evaluation_causes import cause_of_metrics, metric_error
from meshloom.verify.reference.between_steps.evaluation import evaluate
from meshloom.verify.reference.mistakes import Cause
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.reruns import perturbed_parameters

_MOST_BATCHES = 8  # of an evaluation, which may be of many
_REPEATS = 3  # of an evaluation with perturbed parameters


@dataclass(frozen=True, kw_only=True)
class PlanEvaluation:
    """metrics: of the first `batches`, None: of all. facts: what else changes, a sentence each."""

    what: str
    metrics: Mapping[str, float]
    batches: int | None
    facts: Sequence[str]


def evaluate_plan(trainer: Trainer) -> PlanEvaluation:
    """Evaluate under the plan. All ranks call it."""
    before = [_state(each) for each in trainer.replicas]
    run = trainer.synchronous
    assert run is not None
    whole = run.evaluation.num_batches <= _MOST_BATCHES
    batches = None if whole else _MOST_BATCHES
    ours = run.evaluation.evaluate(trainer.next_step, batches)
    changed = [_changes(old, _state(each)) for old, each in zip(before, trainer.replicas, strict=True)]

    def facts_of(replica: Replica) -> Steps[list[list[str]]]:
        return (yield from collect(replica.context.world, changed[trainer.replicas.index(replica)]))

    of_ranks = trainer.together(facts_of)[0]
    facts = list(dict.fromkeys(fact for of_rank in of_ranks for fact in of_rank))
    what = "" if whole else f" of the first {_MOST_BATCHES} batches"
    what = f"the evaluation{what} after step {trainer.next_step - 1}"
    return PlanEvaluation(what=what, metrics=ours, batches=batches, facts=facts)


def _state(replica: Replica) -> dict[str, int]:
    """Digests of what this rank holds, and the mode of every module."""
    modes = {
        f"the mode of {name or 'the model'}": int(each.training)
        for name, each in replica.model.named_modules()
    }
    return {**{name: int(digest(each)) for name, each in replicated_state(replica).items()}, **modes}


def _changes(before: dict[str, int], after: dict[str, int]) -> list[str]:
    return [f"The evaluation changes {name}." for name in before if before[name] != after.get(name)]


def check_metrics(
    ours: PlanEvaluation, reference: Reference, updates: int, tolerance: float, averages: AverageErrors | None
) -> BetweenSteps:
    """The plan's metrics after `updates` updates against those of one device. averages: what evaluations see in place of parameters."""
    seen = partial(averages.in_place_of, reference.parameters) if averages else nullcontext
    with seen():
        errors = _metric_errors(ours.metrics, reference, updates, tolerance, ours.batches)
    causes: list[Cause] = []
    if not all(error.passed for error in errors):
        allowed = {error.name: error.tolerance for error in errors}
        found = cause_of_metrics(
            ours.metrics, allowed, reference, updates, ours.batches, seen, averaged=averages is not None
        )
        causes = [found] if found else []
    return BetweenSteps(what=ours.what, errors=errors, facts=ours.facts, causes=causes)


def _metric_errors(
    ours: Mapping[str, float], reference: Reference, updates: int, tolerance: float, batches: int | None
) -> list[TensorError]:
    right = evaluate(reference, updates, batches)
    errors = {name: metric_error(ours.get(name, math.nan), value) for name, value in right.items()}
    allowed = dict.fromkeys(right, tolerance)
    if any(not error <= tolerance for error in errors.values()):
        # an accuracy changes by a whole sample where rounding exchanges two classes
        for name, effect in _rounding_effects(
            lambda: evaluate(reference, updates, batches), reference, right
        ).items():
            allowed[name] = max(tolerance, effect)
    return [
        TensorError(name=name, kind="metric", step=updates - 1, error=error, tolerance=allowed[name], moved=allowed[name] > tolerance)
        for name, error in errors.items()
    ]  # fmt: skip


def _rounding_effects(
    run: Callable[[], dict[str, float]], reference: Reference, right: dict[str, float]
) -> dict[str, float]:
    """By metric, twice the most that perturbed parameters move it."""
    most = dict.fromkeys(right, 0.0)
    for repeat in range(_REPEATS):
        with torch.no_grad(), perturbed_parameters(reference, repeat):
            for name, value in run().items():
                most[name] = max(most[name], 2 * metric_error(value, right[name]))
    return most
