"""An evaluation under the plan: its metrics against those of one device, and that it changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from meshloom.comm.objects import collect
from meshloom.comm.steps import Steps
from meshloom.parameters.digest import digest
from meshloom.replica.replica import Replica
from meshloom.replica.replica_state import replicated_state
from meshloom.train.trainer import Trainer
from meshloom.verify.between_steps.averages import AverageErrors
from meshloom.verify.between_steps.checks import BetweenSteps, TensorError
from meshloom.verify.between_steps.evaluation_causes import WrongMetrics, cause_of_metrics, metric_error
from meshloom.verify.reference.between_steps.evaluation import evaluate
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.reruns import perturbed_parameters

MODE = "the mode of "  # before a module's name, in what changes
_ALIKE = 1e-6  # how far ranks' metrics may be apart
_MOST_BATCHES = 8  # of an evaluation, which may be of many
_REPEATS = 3  # of an evaluation with perturbed parameters


@dataclass(frozen=True, kw_only=True)
class PlanEvaluation:
    """metrics: of the first `batches`, None: of all. changed: names of parameters, buffers and modules' modes that are others after it.
    disagree: what ranks have of metrics, if it is not the same, a sentence each."""

    what: str
    metrics: Mapping[str, float]
    batches: int | None
    changed: Sequence[str] = ()
    disagree: Sequence[str] = ()


def evaluate_plan(trainer: Trainer) -> PlanEvaluation:
    """Evaluate under the plan. All ranks call it."""
    before = [_state(each) for each in trainer.replicas]
    run = trainer.synchronous
    assert run is not None
    whole = run.evaluation.num_batches <= _MOST_BATCHES
    batches = None if whole else _MOST_BATCHES
    ours = run.evaluation.evaluate_each(trainer.next_step, batches)
    changed = [_changes(old, _state(each)) for old, each in zip(before, trainer.replicas, strict=True)]

    def of_rank(replica: Replica) -> Steps[list[Any]]:
        place = trainer.replicas.index(replica)
        return (yield from collect(replica.context.world, [changed[place], ours[place]]))

    of_ranks = trainer.together(of_rank)[0]
    what = "" if whole else f" of the first {_MOST_BATCHES} batches"
    return PlanEvaluation(
        what=f"the evaluation{what} after step {trainer.next_step - 1}", metrics=ours[0], batches=batches,
        changed=list(dict.fromkeys(name for names, _ in of_ranks for name in names)),
        disagree=list(_disagreements([metrics for _, metrics in of_ranks])),
    )  # fmt: skip


def _disagreements(of_ranks: Sequence[Mapping[str, float]]) -> Iterator[str]:
    for rank, metrics in enumerate(of_ranks):
        for name, value in metrics.items():
            if not metric_error(value, of_ranks[0][name]) <= _ALIKE:
                yield f"{name} is {value:.6g} on rank {rank}, and {of_ranks[0][name]:.6g} on rank 0."
                return


def _state(replica: Replica) -> dict[str, int]:
    """Digests of what this rank holds, and the mode of every module."""
    modes = {
        f"{MODE}{name or 'the model'}": int(each.training) for name, each in replica.model.named_modules()
    }
    return {**{name: int(digest(each)) for name, each in replicated_state(replica).items()}, **modes}


def _changes(before: dict[str, int], after: dict[str, int]) -> list[str]:
    return [name for name in before if before[name] != after.get(name)]


def check_metrics(
    ours: PlanEvaluation, reference: Reference, updates: int, tolerance: float, averages: AverageErrors | None
) -> tuple[BetweenSteps, WrongMetrics | None]:
    """The plan's metrics after `updates` updates against those of one device; and what differs. averages: what evaluations see in place of
    parameters."""
    with averages.in_place_of(reference.parameters) if averages else nullcontext():
        right = evaluate(reference, updates, ours.batches)
        errors = _metric_errors(ours.metrics, right, reference, updates, tolerance, ours.batches)
    wrong: WrongMetrics | None = None
    if not all(error.passed for error in errors):
        wrong = WrongMetrics(
            ours=ours.metrics, right=right, allowed={error.name: error.tolerance for error in errors}, reference=reference, updates=updates,
            batches=ours.batches, averages=averages,
        )  # fmt: skip
    found = cause_of_metrics(wrong) if wrong else None
    facts = [*(f"The evaluation changes {name}." for name in ours.changed), *ours.disagree]
    return BetweenSteps(what=ours.what, errors=errors, facts=facts, causes=[found] if found else []), wrong


def _metric_errors(
    ours: Mapping[str, float], right: Mapping[str, float], reference: Reference, updates: int, tolerance: float, batches: int | None
) -> list[TensorError]:  # fmt: skip
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
    run: Callable[[], dict[str, float]], reference: Reference, right: Mapping[str, float]
) -> dict[str, float]:
    """By metric, twice the most that perturbed parameters move it."""
    most = dict.fromkeys(right, 0.0)
    for repeat in range(_REPEATS):
        with torch.no_grad(), perturbed_parameters(reference, repeat):
            for name, value in run().items():
                most[name] = max(most[name], 2 * metric_error(value, right[name]))
    return most
