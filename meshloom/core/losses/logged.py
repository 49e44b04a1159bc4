"""`meshloom.log()`: values of the user's own, logged in a loss and averaged as the loss is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from meshloom.core.errors import JobError
from meshloom.core.job import Job, LossFunction
from meshloom.core.moments.current_step import answered_by, now

# Of what a loss returned and what it logged, if it logged something: programs return both.
_RETURNED, _LOGGED = "returned", "meshloom.log"


def log(name: str, value: Tensor | float) -> None:
    """Log a value of the step from within the loss or a module's forward, like `meshloom.log("accuracy", accuracy)`.

    value: a scalar tensor or a number, the mean over the chunk's items. Reported is the mean over the global batch,
        in which each chunk has the weight that it has in the loss: its samples, or the weight of (sum, weight).
        A name that is logged again in the same chunk keeps the newest value. No gradient goes through it.

    Values are in the step's line, in JSON and CSV records and in `Progress.logged`. Where no step is computed (the loss
    called in a loop of one's own, a metric, a device that only predicts) nothing happens. Raises `JobError` for
    what is no name or no scalar.

    >>> import torch
    >>> def loss(model, batch):
    ...     log("largest", batch.max())
    ...     return batch.mean()
    >>> computed_with_logs(loss, None, torch.ones(3))
    {'returned': tensor(1.), 'meshloom.log': {'largest': tensor(1.)}}
    """
    found = now().log
    if found is not None:
        found[_checked_name(name)] = _checked_value(name, value)


def computed_with_logs(loss: LossFunction, model: nn.Module | None, batch: Any) -> Any:
    """What the loss returns; with what it logged, if it did."""
    found: dict[str, Any] = {}
    with answered_by(log=found):
        returned = loss(model, batch)
    return joined(returned, found) if found else returned


def joined(returned: Any, found: Mapping[str, Any]) -> dict[str, Any]:
    """What a loss returned, with what it logged."""
    return {_RETURNED: returned, _LOGGED: found}


def with_logs(job: Job) -> Job:
    """The job whose loss returns what it logs as well, as programs that are captured from it must."""
    return replace(job, loss=partial(computed_with_logs, job.loss))


def taken_apart(returned: Any) -> tuple[Any, Mapping[str, Tensor | float]]:
    """What a loss itself returned, and what it logged."""
    if isinstance(returned, dict) and _LOGGED in returned:
        return returned[_RETURNED], returned[_LOGGED]
    return returned, {}


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise JobError(
            f'meshloom.log({name!r}, ...) takes a name first, like meshloom.log("accuracy", value).'
        )
    if name in _TAKEN:
        raise JobError(f"meshloom.log({name!r}, ...): a step reports {name!r} of its own. Use another name.")
    return name


_TAKEN = (
    "step",
    "steps",
    "loss",
    "gradient_norm",
    "learning_rate",
    "samples_per_second",
    "tokens_per_second",
    "loss_scale",
)


def _checked_value(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    if isinstance(value, int | float):
        return float(value)
    what = (
        f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    )
    raise JobError(
        f"meshloom.log({name!r}, ...) got {what}. Give one number, the mean over the batch's items."
    )
