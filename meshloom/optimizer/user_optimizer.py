"""What the job's optimizer and scheduler functions return; what cannot be used is refused in one sentence."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshloom.checkpoint.json_values import NotPlainError, to_json
from meshloom.core.errors import JobError
from meshloom.core.exchange_refusals import check_averages
from meshloom.core.job import Job, NamedParameters
from meshloom.core.job_functions import as_list, without_averages
from meshloom.core.moments.by_hand import as_scheduler, is_scheduler
from meshloom.core.plan import Plan
from meshloom.optimizer.reach import PER_PARAMETER, Reach, added_to, is_known, reach
from meshloom.optimizer.state_pieces import settings
from meshloom.parameters.values.shape_alone import ShapeAlone, ValueReadError


@dataclass(frozen=True, kw_only=True)
class UserOptimizers:
    """What the job's optimizer function returned, and all of it as a list. reaches: what the updates
    of each optimizer depend on. names: of the parameters, by optimizer and group. given: the settings of these groups as the
    function gave them, as JSON; none where they cannot be saved. average: the decay of `Averaged`; None: no averages are kept."""

    returned: Any
    optimizers: list[Optimizer]
    names: list[list[list[str]]]
    given: list[list[Any]]
    reaches: list[Reach]
    average: float | None

    @property
    def looks_at_all(self) -> Optimizer | None:
        """The first optimizer whose updates depend on all of its parameters, if there is one."""
        return next(iter(self.at_once), None)

    @property
    def at_once(self) -> list[Optimizer]:
        """Those whose updates depend on all of their parameters."""
        pairs = zip(self.optimizers, self.reaches, strict=True)
        return [each for each, reach in pairs if reach == "optimizer"]

    @property
    def gathered_bytes(self) -> int:
        """Of the parameters of these, which every rank gets."""
        return sum(each.nbytes for optimizer in self.at_once for each in parameters_of(optimizer))

    @property
    def in_windows(self) -> list[bool]:
        """Whether each optimizer may update a few parameters at a time."""
        return [is_known(each) for each in self.optimizers]


def make_optimizers(job: Job, named_parameters: NamedParameters) -> UserOptimizers:
    """Calls `job.optimizer` with the parameters. Raises `JobError` for optimizers that cannot be used."""
    names = {id(parameter): name for name, parameter in named_parameters}
    returned, average = without_averages(_called(job, named_parameters))
    optimizers = _check(returned, names)
    _check_disjoint(optimizers, names)
    _check_elementwise(optimizers, job)
    grouped = [
        [[names[id(each)] for each in group["params"]] for group in optimizer.param_groups]
        for optimizer in optimizers
    ]
    return UserOptimizers(
        returned=returned, optimizers=optimizers, names=grouped, given=[*map(_given, optimizers)],
        reaches=[reach_for(each, job) for each in optimizers], average=average,
    )  # fmt: skip


def make_without_values(job: Job, named_parameters: NamedParameters) -> UserOptimizers | None:
    """`make_optimizers` for parameters that have no values here; None where the job's function uses some."""
    shapes = [(name, ShapeAlone.like(each)) for name, each in named_parameters]
    try:
        made = make_optimizers(job, [*shapes])
    except ValueReadError:
        return None
    parameters = {id(shape): each for (_, shape), (_, each) in zip(shapes, named_parameters, strict=True)}
    for group in (group for optimizer in made.optimizers for group in optimizer.param_groups):
        group["params"][:] = [parameters[id(each)] for each in group["params"]]
    return made


def _given(optimizer: Optimizer) -> list[Any]:
    try:
        return settings(optimizer)["groups"]
    except JobError:  # which a checkpoint meets again
        return []


def reach_for(optimizer: Optimizer, job: Job) -> Reach:
    """What its updates depend on, with what the job says of it."""
    if takes_closure(optimizer):
        return "optimizer"
    return reach(optimizer, elementwise=job.elementwise, per_parameter=job.per_parameter)


def reach_in_words(optimizer: Optimizer) -> tuple[str, str]:
    """Of an optimizer that gets all parameters, why it does, and what to write instead, as a sentence or nothing."""
    kind = type(optimizer).__name__
    if takes_closure(optimizer):
        return f"{kind} looks at all parameters at once", ""
    added = added_to(optimizer)
    return (
        f"{kind}{f' with {added}' if added else ''} is not one whose rule is known, so it gets all parameters",
        " Job(elementwise=True) or Job(per_parameter=True) says what it is.",
    )


def for_optimizers(plan: Plan, made: UserOptimizers) -> tuple[Plan, list[str]]:
    """The plan that ranks run, which is without zero where an optimizer evaluates the loss in its update; notes for the user. Raises
    `PlanError` for one that keeps no averages."""
    if made.average is not None:
        check_averages(plan.exchange, plan.precision)
    kind = next((type(each).__name__ for each in made.optimizers if takes_closure(each)), "")
    if plan.zero and kind:
        note = (
            f"{kind} evaluates the loss in its update and looks at all parameters at once, so every rank keeps all of them: "
            f"zero={plan.zero} divides nothing."
        )
        return replace(plan, zero=0, zero_within=0), [note]
    optimizer = made.looks_at_all
    if optimizer is None or (plan.tp == 1 and not plan.zero):
        return plan, []
    why, instead = reach_in_words(optimizer)
    return plan, [f"{why}: every rank gathers them.{instead}"]


def make_schedulers(job: Job, returned: Any) -> tuple[list[Any], list[Any]]:
    """The schedulers for what the job's optimizer function returned: those that go by steps, and by a metric of evaluations. Raises
    `JobError` for those that cannot be used."""
    by_steps = [as_scheduler(each) for each in as_list(job.scheduler(returned))] if job.scheduler else []
    for scheduler in by_steps:
        if not is_scheduler(scheduler):
            raise JobError(
                f"The scheduler function returned a {type(scheduler).__name__}. Return a scheduler, like lambda optimizer: "
                "CosineAnnealingLR(optimizer, 100), a function of a step's number, or a list of them."
            )
    given = job.evaluate.scheduler if job.evaluate else None
    by_metric = as_list(given.scheduler(returned)) if given else []
    for scheduler in by_metric:
        goes_by_steps = isinstance(scheduler, LRScheduler) and "metrics" not in inspect.signature(scheduler.step).parameters  # fmt: skip
        if not is_scheduler(scheduler) or goes_by_steps:
            raise JobError(
                f"The function of ByMetric returned a {type(scheduler).__name__}, which is no scheduler whose step() takes a metric. Return one, like "
                "lambda optimizer: ReduceLROnPlateau(optimizer), or use Job(scheduler=...), which goes by steps."
            )
    for scheduler in (*by_steps, *by_metric):
        _check_optimizer(scheduler, as_list(returned))
        scheduler_values(scheduler)  # find out now rather than at the first checkpoint
    return by_steps, by_metric


def _check_optimizer(scheduler: Any, optimizers: Sequence[Any]) -> None:
    """Raises `JobError` for a scheduler of torch whose rates are those of another optimizer."""
    of = scheduler.optimizer if isinstance(scheduler, LRScheduler) else None
    if of is not None and not any(of is each for each in optimizers):
        raise JobError(
            f"The scheduler function returned a {type(scheduler).__name__} of another optimizer than the one it was given, whose rate would never change. "
            "Make it of its argument, like lambda optimizer: CosineAnnealingLR(optimizer, 100)."
        )


def scheduler_values(scheduler: Any) -> Any:
    """A scheduler's state as JSON. Functions are left out: the job builds the scheduler with the same
    ones."""
    code = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
    state = {key: value for key, value in scheduler.state_dict().items() if not isinstance(value, code)}
    try:
        return to_json(state)
    except NotPlainError as error:
        raise JobError(
            f"{type(scheduler).__name__} cannot be saved: {error}. Keep numbers, strings, small tensors and lists of them in its state_dict()."
        ) from None


def _called(job: Job, named_parameters: NamedParameters) -> Any:
    """What the optimizer function returned."""
    try:
        return job.optimizer(list(named_parameters))
    except ValueError as error:
        if "empty parameter list" in str(error):
            raise JobError(
                "The optimizer function gave an optimizer no parameters. Give each at least one, or leave that optimizer out."
            ) from error
        raise


def _check(made: Any, names: Mapping[int, str]) -> list[Optimizer]:
    optimizers = as_list(made)
    if not optimizers:
        raise JobError(
            "The optimizer function returned an empty list. Return one torch.optim.Optimizer, or several over disjoint parameters."
        )
    for index, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, Optimizer):
            raise JobError(
                f"The optimizer function returned a {type(optimizer).__name__}, not a torch.optim.Optimizer. Return one, or a list of several "
                "over disjoint parameters."
            )
        if takes_closure(optimizer) and len(optimizers) > 1:
            raise JobError(
                f"{type(optimizer).__name__} evaluates the loss several times in a step, and the optimizer function returned {len(optimizers)} optimizers. "
                "Return it alone."
            )
        parameters = parameters_of(optimizer)
        if not parameters:
            raise JobError(
                f"{type(optimizer).__name__} (optimizer {index}) has no parameters. Give it at least one, or leave it out."
            )
        for parameter in parameters:
            if id(parameter) not in names:
                raise JobError(
                    f"{type(optimizer).__name__} holds a parameter of shape {list(parameter.shape)} that is not a trainable parameter of the model. "
                    "Build it from the named parameters that the optimizer function receives."
                )
    return optimizers


def _check_disjoint(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
    owner: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        for parameter in parameters_of(optimizer):
            other = owner.setdefault(id(parameter), optimizer)
            if other is not optimizer:
                raise JobError(
                    f"{names[id(parameter)]} is in two optimizers, {type(other).__name__} and {type(optimizer).__name__}. "
                    "Give each parameter to one of them."
                )


def _check_elementwise(optimizers: Sequence[Optimizer], job: Job) -> None:
    """Raises `JobError` where the job's word is for none of its optimizers, and not true of one."""
    whole = next((type(each).__name__ for each in optimizers if type(each) in PER_PARAMETER), None)
    if job.elementwise and whole and all(map(is_known, optimizers)):
        raise JobError(
            f"Job(elementwise=True) says that each element is updated by itself, and {whole} looks at whole parameters. Leave it out."
        )


def takes_closure(optimizer: Optimizer) -> bool:
    """Whether a step needs a closure that evaluates the loss (LBFGS); most optimizers take one or leave it.

    >>> import torch
    >>> parameters = [nn.Parameter(torch.ones(2))]
    >>> takes_closure(torch.optim.LBFGS(parameters)), takes_closure(torch.optim.SGD(parameters))
    (True, False)
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Of all of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
