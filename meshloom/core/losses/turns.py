"""The turns of a step: which of a job's losses it computes, one after another, each with an update.

losses={"critic": Objective(updates=2, ...), "generator": Objective(every=3, ...)}

step 0    critic 0    critic 1
step 1    critic 0    critic 1
step 2    critic 0    critic 1    generator 2        the number is that of its random draws in the step
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import nn

from meshloom.core.errors import PlanError
from meshloom.core.exchanges import EXCHANGES
from meshloom.core.job import Job
from meshloom.core.modules.built import built
from meshloom.core.objectives import owners_of
from meshloom.core.plan import Plan
from meshloom.core.precisions import PRECISIONS


@dataclass(frozen=True)
class LossTurn:
    """One loss of a step, and its update. loss: its name; "" in a job of one loss. number: of the loss in the job.
    draws: number of its random draws in the step, whichever losses are due."""

    loss: str = ""
    number: int = 0
    draws: int = 0


ONE_LOSS = (LossTurn(),)


def _no_average(job: Job, plan: Plan) -> str:
    if job.losses:
        return "of several losses, which update different parameters at different times"
    if plan.exchange != "all_reduce":
        return f"with exchange={plan.exchange}, where replicas have parameters of their own or none"
    if PRECISIONS[plan.precision].parameters:
        return f"with precision={plan.precision}, whose digits are too few for it"
    return ""


def turns_of(job: Job, step: int) -> Sequence[LossTurn]:
    """Of this step, in order; none where no loss is due."""
    if not job.losses:
        return ONE_LOSS
    found: list[LossTurn] = []
    draws = 0
    for number, (name, each) in enumerate(job.losses.items()):
        if (step + 1) % each.every == 0:
            found += [LossTurn(name, number, draws + repeated) for repeated in range(each.updates)]
        draws += each.updates
    return found


def check_turns(job: Job, plan: Plan) -> None:
    """Raises `PlanError` for plans under which several losses have no turns, evaluations do not decide when to
    stop, parameters have no average, or what changes over the steps has none."""
    entry = EXCHANGES[plan.exchange]
    if job.evaluate and job.evaluate.best and not entry.synchronous:
        raise PlanError(
            f"exchange={plan.exchange} evaluates snapshots while workers go on, and keeps no best one: Evaluate(best=..., patience=...) are for ranks that step "
            "together. Leave them out, or use another exchange."
        )
    if job.average is not None and (why := _no_average(job, plan)):
        raise PlanError(f"Job(average=...) is not kept {why}. Leave one of them out.")
    if job.losses and (entry.independent or not entry.synchronous):
        raise PlanError(
            f"exchange={plan.exchange} is for jobs of one loss, and this one has {len(job.losses)} ({', '.join(job.losses)}), which steps take in turn: "
            "replicas would have to agree after each. Use another exchange."
        )


def jobs_of(job: Job) -> dict[str, Job]:
    """By loss, a job of that loss alone: the model's other parameters are frozen. A job of one loss is its own."""
    return {name: _job_of(job, name) for name in job.losses} or {"": job}


def _job_of(job: Job, loss: str) -> Job:
    objective = job.losses[loss]

    def model() -> nn.Module:
        whole = built(job.model)
        names = [name for name, each in whole.named_parameters() if each.requires_grad]
        owners = owners_of(job.losses, names)
        for name, each in whole.named_parameters():
            each.requires_grad_(owners.get(name) == loss)
        return whole

    return replace(
        job,
        model=model,
        losses={},
        loss=objective.loss,
        optimizer=objective.optimizer,
        scheduler=objective.scheduler,
        clip_grad_norm=objective.clip_grad_norm,
    )


class OwnGradients:
    """Gradients of one loss's own parameters at a time: the others require none meanwhile.

    model: with all of the job's parameters, as it was built; later a rank may hold a part of it.
    """

    def __init__(self, job: Job, model: nn.Module) -> None:
        self._model = model
        names = [name for name, each in model.named_parameters() if each.requires_grad]
        self._owners = owners_of(job.losses, names)
        self._numbers = {loss: number for number, loss in enumerate(job.losses)}

    @contextmanager
    def of(self, loss: str) -> Iterator[None]:
        """A context in which this loss's parameters alone require gradients."""
        trained = [
            (each, self._owners[name])
            for name, each in self._model.named_parameters()
            if name in self._owners
        ]
        for each, owner in trained:
            each.requires_grad_(owner == loss)
        try:
            yield
        finally:
            for each, _ in trained:
                each.requires_grad_(True)

    @property
    def num_losses(self) -> int:
        return len(self._numbers)

    def number_of(self, name: str) -> int:
        """Of the loss that trains this parameter; -1 if none does."""
        return self._numbers[self._owners[name]] if name in self._owners else -1
