"""`training_step` of a LightningModule as a job's loss, and what `validation_step` logs as its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.adapters.trainer_loss import sum_of
from meshloom.core.errors import JobError
from meshloom.core.losses.logged import log
from meshloom.core.moments.current_step import step as current_step

# What a step logs: name -> its value, and the batch size that was given.
Logged = dict[str, tuple[Any, int | None]]
_LOGGED: ContextVar[Logged | None] = ContextVar("logged", default=None)
_OF_STEPS = ("loss", "step", "steps")  # names that a step reports of its own


class LightningLoss:
    """Of (model, batch). per_epoch: batches of an epoch. accumulation: `accumulate_grad_batches`, by which Lightning divides
    the losses of a step, however few they are. numbered: whether the step uses its `batch_idx`."""

    def __init__(self, per_epoch: int, accumulation: int, *, numbered: bool) -> None:
        self._per_epoch, self._accumulation, self._numbered = per_epoch, accumulation, numbered

    def __call__(self, model: Any, batch: Any) -> Tensor | tuple[Tensor, Tensor]:
        steps_per_epoch = -(-self._per_epoch // self._accumulation)
        first = current_step() % steps_per_epoch * self._accumulation if self._numbered else 0
        if self._accumulation == 1:
            return loss_of(model.training_step(*arguments(model.training_step, batch, first)))
        sums: list[Tensor] = []
        shares: list[Tensor] = []
        weights: list[Tensor] = []
        logged: list[Logged] = []
        for place, group in enumerate(batch):
            number = first + place
            returned, found = with_logged(model.training_step, group["inputs"], number)
            loss, here = loss_of(returned), group["part"]
            share = here[0].to(loss.dtype) / here[1].to(loss.dtype)
            sums.append(loss * share)
            shares.append(share)
            weights.append(share * (self._accumulation / here[2].to(loss.dtype)))
            logged.append(found)
        _log_means(logged, shares)
        return sum_of(sums), sum_of(weights)


class LightningMetric:
    """Of (model, batch): the mean over samples of what `validation_step` logs under `name`, weighted as Lightning does."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        sums: list[Tensor] = []
        weights: list[Tensor] = []
        for group in batch:
            _, found = with_logged(model.validation_step, group["inputs"], 0)
            if self._name not in found:
                raise JobError(
                    f"validation_step logs {self._name!r} for some batches and not for others. Log it for each."
                )
            value, size = found[self._name]
            value = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
            weight = group["part"][0] if size is None else torch.tensor(size)
            sums.append(value.reshape(()) * weight)
            weights.append(weight)
        return sum_of(sums), sum_of(weights)


def with_logged(step: Any, batch: Any, number: int) -> tuple[Any, Logged]:
    """What a step returns for a batch, and what it logs."""
    found: Logged = {}
    token = _LOGGED.set(found)
    try:
        return step(*arguments(step, batch, number)), found
    finally:
        _LOGGED.reset(token)


def _log_means(logged: list[Logged], shares: list[Tensor]) -> None:
    """Log what all microbatches of a chunk log, as means over them."""
    total = sum_of(shares)
    for name in logged[0]:
        values = [each[name][0] * share for each, share in zip(logged, shares, strict=True) if name in each]
        if len(values) == len(shares):
            _log(name, sum_of(values) / total)


def _log(name: str, value: Any) -> None:
    log(f"train_{name}" if name in _OF_STEPS else name, value)


def log_of_module(name: str, value: Any, *_: Any, **options: Any) -> None:
    """What `self.log` is in the job's module: `meshloom.log` in a training step, of a validation step its metric."""
    if isinstance(value, nn.Module):
        raise JobError(
            f"self.log({name!r}, {type(value).__name__}) logs a metric that keeps state over batches, of which each rank sees its own. Log its value of the batch, "
            "like torchmetrics.functional has them."
        )
    reduction = options.get("reduce_fx", "mean")
    if reduction not in ("mean", torch.mean):
        raise JobError(
            f"self.log({name!r}, reduce_fx={reduction!r}): a job reports means. Leave reduce_fx out."
        )
    if isinstance(value, Mapping):
        raise JobError(f"self.log({name!r}, ...) got several values. Use self.log_dict.")
    found = _LOGGED.get()
    if found is None:
        _log(name, value)
    else:
        found[name] = value, options.get("batch_size")


def loss_of(returned: Any) -> Tensor:
    """The loss in what `training_step` returned."""
    loss = returned.get("loss") if isinstance(returned, Mapping) else returned
    if not isinstance(loss, Tensor):
        raise JobError(
            f"training_step returned {'a ' + type(returned).__name__ if returned is not None else 'None'} without a loss. Return the loss, or a dict with it as 'loss', "
            "for every batch."
        )
    return loss


def arguments(step: Any, batch: Any, number: int) -> tuple[Any, ...]:
    """What a step takes: the batch, and its number where it takes one."""
    code = step.__func__.__code__
    return (batch, number)[: max(1, code.co_argcount - 1)]
