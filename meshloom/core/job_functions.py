"""What the functions of a job take and return, metrics of all samples together, and schedulers that go by a metric."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from meshloom.core.averaged import Averaged
from meshloom.core.errors import JobError

# A scalar mean over the batch's samples, or (sum, weight): a scalar sum and the number of items in it.
Loss = Tensor | tuple[Tensor, Tensor | float]
LossFunction = Callable[[Any, Any], Loss]
NamedParameters = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Metric:
    """A metric of all samples together, such as F1 or a rank correlation, whose mean over chunks is another number. Raises `JobError`.

    update: of (model, batch), called for each chunk; returns a tensor [samples, ...], or a tuple or dict of them.
    compute: called once, on rank 0, with what `update` has returned for all samples, in the order of the data and on the CPU: a tensor
        as its argument, a tuple's as its arguments, a dict's by name. Returns one number. It may be an object of torchmetrics; if it has a
        `reset()`, that is called afterwards.

    >>> f1 = Metric(
    ...     update=lambda model, batch: (model(batch["x"]).argmax(1), batch["y"]),
    ...     compute=lambda ours, right: 2 * (ours & right).sum() / (ours.sum() + right.sum()),
    ... )
    """

    update: Callable[[Any, Any], Any]
    compute: Callable[..., Any]

    def __post_init__(self) -> None:
        for name, function in (("update", self.update), ("compute", self.compute)):
            if not callable(function):
                raise JobError(f"Metric({name}=...) must be a function, not {type(function).__name__}.")
        check_takes("Metric(update=...)", self.update, TAKES["loss"])


@dataclass(frozen=True)
class ByMetric:
    """Schedulers that evaluations step: `Evaluate(scheduler=ByMetric(...))`. Raises `JobError`.

    They are stepped after each evaluation that is due by `Evaluate.every`, with the value of `metric` there, in all ranks with the
    same, and not after a training step. An evaluation after the last step that is not due steps nothing.

    scheduler: of what the job's `optimizer` returned; returns a scheduler whose `step` takes a metric, or a list of them.
    metric: the name of one of `Evaluate.metrics`. of: of its value, what schedulers are given in its place, as `math.exp` of a loss for its
        perplexity.

    >>> import torch
    >>> schedule = ByMetric(lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2), "val_loss", of=abs)
    >>> schedule.value({"val_loss": -0.5, "accuracy": 0.9})
    0.5
    """

    scheduler: Callable[[Any], Any]
    metric: str
    of: Callable[[float], float] | None = None

    def __post_init__(self) -> None:
        if not callable(self.scheduler):
            raise JobError(
                f"ByMetric takes a function that makes the scheduler, not a {type(self.scheduler).__name__}, and is an argument of Evaluate: write "
                "Evaluate(..., scheduler=ml.ByMetric(lambda optimizer: ReduceLROnPlateau(optimizer), 'val_loss'))."
            )
        check_takes("ByMetric(scheduler=...)", self.scheduler, TAKES["scheduler"])
        if self.of is not None:
            if not callable(self.of):
                raise JobError(
                    f"ByMetric(..., of={self.of!r}) must be a function of the metric's value, like math.exp."
                )
            check_takes("ByMetric(..., of=...)", self.of, ("value",))

    def value(self, metrics: Mapping[str, float]) -> float:
        """What the schedulers are stepped with. metrics: of an evaluation, by name."""
        value = metrics[self.metric]
        return float(self.of(value)) if self.of else value


TAKES = {
    "model": (),
    "loss": ("model", "batch"),
    "optimizer": ("named",),
    "scheduler": ("optimizer",),
    "data": (),
    "collate": ("samples",),
}


def is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_takes(setting: str, function: Any, given: Sequence[str], advice: str = "") -> None:
    """Raises `JobError` for a function that cannot be called with what it will be given. setting: as the user writes it.

    >>> check_takes("Job(loss=...)", lambda batch: batch, ("model", "batch"))
    Traceback (most recent call last):
    meshloom.core.errors.JobError: Job(loss=...) is called with (model, batch), and this function takes (batch).
    """
    if isinstance(function, nn.Module) and type(function).__module__.startswith("torch.nn."):
        calls = f"forward{tuple(inspect.signature(function.forward).parameters)}".replace("'", "")
        raise JobError(
            f"{setting} is called with ({', '.join(given)}), and {type(function).__name__} has {calls}.{advice}"
        )
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # some that are not written in Python have none
        return
    try:
        signature.bind(*given)
    except TypeError:
        takes = ", ".join(signature.parameters)
        raise JobError(
            f"{setting} is called with ({', '.join(given)}), and this function takes ({takes}).{advice}"
        ) from None


def as_list(given: Any) -> list[Any]:
    """What may be given, or returned, as one thing or as several."""
    return list(given) if isinstance(given, list | tuple) else [given]


def without_averages(returned: Any) -> tuple[Any, float | None]:
    """What a job's optimizer function returned, with the optimizers within those that are `Averaged`; and the decay, None without. Raises
    `JobError` where they have different ones."""
    given = as_list(returned)
    decays = [each.decay if isinstance(each, Averaged) else None for each in given]
    if len(set(decays)) > 1:
        raise JobError(
            f"Averages are of all trainable parameters, with one decay, and those of the optimizers are {', '.join(map(str, decays))}. Wrap each optimizer "
            "that the function returns: [ml.Averaged(a, 0.999), ml.Averaged(b, 0.999)]."
        )
    if not decays or decays[0] is None:
        return returned, None
    plain = [each.optimizer for each in given]
    return plain if isinstance(returned, list | tuple) else plain[0], decays[0]
