"""A scheduler that goes by a metric of the evaluation: stepped after an evaluation, with its value there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from meshloom.core.errors import JobError
from meshloom.core.job import Job
from meshloom.core.job_functions import as_list, check_takes
from meshloom.core.moments.by_hand import is_scheduler


class ByMetric:
    """What a job's scheduler function returns for a scheduler whose `step` takes a metric. Raises `JobError`.

    It is stepped after each evaluation that is due by `Evaluate.every`, with the value of `metric` there, in all ranks
    with the same, and not after a training step. of: of that value, what the scheduler is given in its place, as `math.exp` of a
    loss for its perplexity. An evaluation after the last step that is not due steps nothing.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    >>> schedule = ByMetric(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0), "val_loss")
    >>> for loss in (0.5, 0.4, 0.6):
    ...     schedule.step()
    ...     schedule.evaluated({"val_loss": loss})
    >>> optimizer.param_groups[0]["lr"]
    0.1
    """

    def __init__(self, scheduler: Any, metric: str, of: Callable[[float], float] | None = None) -> None:
        if not is_scheduler(scheduler) or isinstance(scheduler, type):
            what = (
                f"the class {scheduler.__name__}"
                if isinstance(scheduler, type)
                else f"a {type(scheduler).__name__}"
            )
            raise JobError(
                f"ByMetric takes a scheduler, like ByMetric(ReduceLROnPlateau(optimizer), 'val_loss'), not {what}."
            )
        if (
            isinstance(scheduler, LRScheduler)
            and "metrics" not in inspect.signature(scheduler.step).parameters
        ):
            raise JobError(f"{type(scheduler).__name__} goes by steps: its step() takes no metric. Return it without ByMetric, or use ReduceLROnPlateau.")  # fmt: skip
        if not isinstance(metric, str):
            raise JobError(f"ByMetric(..., metric={metric!r}) must be the name of a metric of Evaluate, like 'val_loss'.")  # fmt: skip
        self.scheduler: Any = scheduler
        self.metric = metric
        if of is not None:
            if not callable(of):
                raise JobError(
                    f"ByMetric(..., of={of!r}) must be a function of the metric's value, like math.exp."
                )
            check_takes("ByMetric(..., of=...)", of, ("value",))
        self.of = of

    def step(self) -> None:
        """After a training step: nothing."""

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """After an evaluation. metrics: its values by name."""
        value = metrics[self.metric]
        self.scheduler.step(float(self.of(value)) if self.of else value)

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The scheduler goes on from there."""
        self.scheduler.load_state_dict(state)


def those_by_metric(schedulers: Sequence[Any]) -> list[ByMetric]:
    """The ones that evaluations step."""
    return [each for each in schedulers if isinstance(each, ByMetric)]


def without_evaluation(job: Job) -> Job:
    """The job without its `Evaluate` and the schedulers that go by it, for a run of some steps that evaluates nothing."""
    return replace(job, evaluate=None, scheduler=_by_steps(job.scheduler))


def _by_steps(scheduler: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    if scheduler is None:
        return None

    def others(optimizer: Any) -> list[Any]:
        return [each for each in as_list(scheduler(optimizer)) if not isinstance(each, ByMetric)]

    return others
