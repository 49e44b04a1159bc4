"""What the job's optimizer and scheduler functions return; what cannot be used is refused in one sentence."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn
from torch.optim import LBFGS, Optimizer

from meshloom.checkpoint.json_values import NotPlainError, to_json
from meshloom.core.errors import JobError
from meshloom.core.job import Job, NamedParameters
from meshloom.optimizer.elementwise import Reach, reach, steps_in_windows


@dataclass(frozen=True, kw_only=True)
class UserOptimizers:
    """What the job's optimizer function returned, and the same as a list. elementwise: the job's setting. names: of
    the parameters, by optimizer and group."""

    returned: Any
    optimizers: list[Optimizer]
    names: list[list[list[str]]]
    elementwise: bool | None

    @cached_property
    def reaches(self) -> list[Reach]:
        """What the updates of each optimizer depend on. To be read before their parameters are replaced by
        slices."""
        return [reach(each, elementwise=self.elementwise) for each in self.optimizers]

    @cached_property
    def in_windows(self) -> list[bool]:
        """Whether each optimizer may update a few parameters at a time. To be read before their parameters are replaced
        by slices."""
        pairs = zip(self.optimizers, self.reaches, strict=True)
        return [each_reach != "optimizer" and steps_in_windows(each) for each, each_reach in pairs]


def make_optimizers(job: Job, named_parameters: NamedParameters) -> UserOptimizers:
    """Calls `job.optimizer` with the parameters. Raises `JobError` for optimizers that cannot be used."""
    returned = _call(job, named_parameters)
    names = {id(parameter): name for name, parameter in named_parameters}
    optimizers = _check(returned, names)
    grouped = [
        [[names[id(each)] for each in group["params"]] for group in optimizer.param_groups]
        for optimizer in optimizers
    ]
    return UserOptimizers(
        returned=returned, optimizers=optimizers, names=grouped, elementwise=job.elementwise
    )


def make_schedulers(job: Job, made: Any) -> list[Any]:
    """The schedulers for what `job.optimizer` returned: none, one or several. Raises `JobError` for those
    that cannot be used."""
    if job.scheduler is None:
        return []
    returned = job.scheduler(made)
    schedulers: list[Any] = list(returned) if isinstance(returned, list | tuple) else [returned]
    for scheduler in schedulers:
        if not all(
            callable(getattr(scheduler, name, None)) for name in ("step", "state_dict", "load_state_dict")
        ):
            raise JobError(
                f"The scheduler function returned a {type(scheduler).__name__}. Return a scheduler, like lambda optimizer: "
                "CosineAnnealingLR(optimizer, 100), or a list of them."
            )
        scheduler_values(scheduler)  # find out now rather than at the first checkpoint
    return schedulers


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


def _call(job: Job, named_parameters: NamedParameters) -> Any:
    try:
        return job.optimizer(list(named_parameters))
    except ValueError as error:
        if "empty parameter list" in str(error):
            raise JobError(
                "The optimizer function gave an optimizer no parameters. Give each at least one, or leave that optimizer out."
            ) from error
        raise


def _check(made: Any, names: Mapping[int, str]) -> list[Optimizer]:
    optimizers: list[Any] = list(made) if isinstance(made, list | tuple) else [made]
    if not optimizers:
        raise JobError(
            "The optimizer function returned an empty list. Return one torch.optim.Optimizer, or several over disjoint parameters."
        )
    owner: dict[int, int] = {}
    for index, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, Optimizer):
            raise JobError(
                f"The optimizer function returned a {type(optimizer).__name__}, not a torch.optim.Optimizer. Return one, or a list of several "
                "over disjoint parameters."
            )
        if isinstance(optimizer, LBFGS):
            raise JobError(
                "LBFGS evaluates the loss several times in a step, which is not supported. Use one that steps once per gradient, such as AdamW."
            )
        parameters: list[nn.Parameter] = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
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
            if owner.setdefault(id(parameter), index) != index:
                raise JobError(
                    f"{names[id(parameter)]} is in two optimizers, {type(optimizers[owner[id(parameter)]]).__name__} and {type(optimizer).__name__}. "
                    "Give each parameter to one of them."
                )
    return optimizers
