"""An evaluation of the plan: every metric, and what the evaluation changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshloom.comm.objects import collect
from meshloom.parameters.digest import digest
from meshloom.replica.replica import Replica
from meshloom.replica.replica_state import replicated_state
from meshloom.train.trainer import Trainer
from meshloom.verify.between_steps.checks import BetweenSteps, metric_error
from meshloom.verify.compared.compare_evaluation import PlanEvaluation
from meshloom.verify.comparison_run import ComparisonRun

_ALIKE = 1e-6  # how far ranks' metrics may be apart
_MOST_BATCHES = 8  # of an evaluation, which may be of many
_NOT_DUE = "the checkpoint of a run that ends with an evaluation that is not due,"


def evaluate_plan(trainer: Trainer, *, last: bool = False) -> PlanEvaluation:
    """Evaluate under the plan. last: as after the last step of a run, which saves, too. All ranks call it."""
    before = [_state(each) for each in trainer.replicas]
    run = trainer.synchronous
    assert run is not None
    batches = None if run.evaluation.num_batches <= _MOST_BATCHES else _MOST_BATCHES
    with run.evaluation.of_first(batches):
        if last:
            run.after_step(last=True)
        else:
            run.evaluate(due=False)
    ours = run.evaluation.newest

    def collected(replica: Replica) -> list[list[Any]]:
        number, now = trainer.replicas.index(replica), _state(replica)
        changed = [name for name, each in before[number].items() if each != now.get(name)]
        return collect(replica.context.world, [changed, ours[number]])

    of_ranks = trainer.together(collected)[0]
    what = "" if batches is None else f" of the first {batches} batches"
    return PlanEvaluation(
        what=f"the evaluation{what} after step {trainer.next_step - 1}", metrics=ours[0], batches=batches,
        changed=list(dict.fromkeys(name for names, _ in of_ranks for name in names)),
        disagree=list(_disagreements([metrics for _, metrics in of_ranks]))
    )  # fmt: skip


def checked_evaluation(
    trainer: Trainer, one: ComparisonRun | None, into: Path | None = None, *, last: bool
) -> tuple[list[BetweenSteps], bool]:
    """An evaluation compared with one device, on rank 0, if the job has any; and whether it leaves everything as it is, by what this rank knows.
    Then schedulers that go by a metric are stepped. last: what training does after its last step, which saves, too, into this directory if there
    is one. All ranks call it."""
    run = trainer.synchronous
    assert run is not None
    if into is not None:
        run.save_into(into)
    if trainer.job.evaluate is None:
        if last:
            run.after_step(last=True)
        return [], True
    ours = evaluate_plan(trainer, last=last)
    compared = one.check_metrics(ours, trainer.next_step) if one else None
    checked, unchanged = [compared] if compared else [], not ours.changed
    if not last or steps_schedulers_apart(trainer):
        if last and one and run.saved:
            saved = one.check_saved(run.saved, _NOT_DUE)
            stepped = all(each.passed for each in saved.errors) and any(" scheduler " in each for each in saved.facts)  # fmt: skip
            checked.append(saved)
            unchanged = unchanged and not stepped
        run.evaluation.step_schedulers(ours.metrics)
    if one:
        one.step_schedulers(ours.metrics)
    return checked, unchanged


def steps_schedulers_apart(trainer: Trainer) -> bool:
    """Whether schedulers go by a metric and training leaves them as they are in an evaluation after this step, as it is not due."""
    given = trainer.job.evaluate
    return given is not None and trainer.next_step % given.every != 0 and given.scheduler is not None


def _disagreements(of_ranks: Sequence[Mapping[str, float]]) -> Iterator[str]:
    for rank, metrics in enumerate(of_ranks):
        for name, value in metrics.items():
            if not metric_error(value, of_ranks[0][name]) <= _ALIKE:
                yield f"{name} is {value:.6g} on rank {rank}, and {of_ranks[0][name]:.6g} on rank 0."
                return


def _state(replica: Replica) -> dict[str, int]:
    """Digests of what this rank holds and of numbers and words in attributes, such as a module's mode, and which parameters are trained."""
    trained = {
        f"{name}:requires_grad": int(each.requires_grad) for name, each in replica.model.named_parameters()
    }
    attributes = {
        f"{path}.{name}".lstrip("."): hash((type(value), value))
        for path, module in replica.model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float | str)
    }
    held = {name: int(digest(each)) for name, each in replicated_state(replica).items()}
    return {**held, **attributes, **trained}
