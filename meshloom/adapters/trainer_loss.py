"""The loss of a transformers `Trainer`, as a job has it: a sum and its weight, of any chunk of a step.

A trainer divides by what it has counted over all microbatches of a step, or averages over them. Which of these is found
by trial (`kind_of`), since a model may take the count and not use it:

    tokens    L = a / items              sum: L items                    weight: items
    mean      L, divided by microbatches sum: L samples / of microbatch  weight: samples / of microbatch
    sum       L, added up                sum: as mean                    weight: as mean, divided by microbatches
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.core.errors import JobError
from meshloom.core.moments.modes import Modes
from meshloom.core.random import preserved_draws

Weighted = tuple[Tensor, Tensor]


class TrainerLoss:
    """Of (model, batch). trainer: whose `compute_loss` is called. kind: as above, of steps of several microbatches; "":
    a step has one."""

    def __init__(self, trainer: Any, kind: str) -> None:
        self._trainer, self._kind = trainer, kind

    def __call__(self, model: nn.Module, batch: Any) -> Tensor | Weighted:
        if not self._kind:
            return loss_by_items(self._trainer, model, batch)
        parts = [self._of_part(model, group["inputs"], group["part"]) for group in batch]
        return sum_of([each for each, _ in parts]), sum_of([weight for _, weight in parts])

    def _of_part(self, model: nn.Module, inputs: Any, part: Tensor) -> Weighted:
        if self._kind == "tokens":
            returned = loss_by_items(self._trainer, model, inputs)
            assert isinstance(returned, tuple)
            return returned
        loss = self._trainer.compute_loss(
            model, dict(inputs), num_items_in_batch=counted(self._trainer, inputs)
        )
        share = part[0].to(loss.dtype) / part[1].to(loss.dtype)
        return loss * share, share / part[2].to(loss.dtype) if self._kind == "sum" else share


def loss_by_items(trainer: Any, model: nn.Module, inputs: Any) -> Tensor | Weighted:
    """The loss of a batch, times its labels, and their number; of a batch without labels its mean over the samples."""
    items = counted(trainer, inputs)
    labels = inputs.get("labels")
    passed = None if items is None else items.clamp(min=1)  # of a chunk without labels the sum is 0
    loss = trainer.compute_loss(model, dict(inputs), num_items_in_batch=passed)
    if items is None and not isinstance(labels, Tensor):
        return loss
    weight = labels.ne(-100).sum() if items is None else items
    weight = weight.to(loss.dtype)
    return loss * weight, weight


def counted(trainer: Any, inputs: Mapping[str, Any]) -> Tensor | None:
    """What the trainer counts in a batch: labels that are not -100, of causal language models but the first of each
    sequence. float [], None if it counts nothing."""
    labels = inputs.get("labels")
    device = labels.device if isinstance(labels, Tensor) else torch.device("cpu")
    return trainer._get_num_items_in_batch([inputs], device)


def kind_of(trainer: Any, model: nn.Module, inputs: Mapping[str, Any], accumulation: int) -> str:
    """How the loss depends on the number of items: "tokens", "mean" or "sum". inputs: of a microbatch. Raises `JobError`
    for one that is none of these over `accumulation` microbatches."""
    items = counted(trainer, inputs)
    scaled = trainer.loss_is_scaled_for_ga
    if scaled is None:
        scaled = (
            trainer.model_accepts_loss_kwargs and items is not None
        ) or trainer.compute_loss_func is not None
    constant = "sum" if scaled else "mean"
    if items is None:
        return constant
    ones, twos = (_tried(trainer, model, inputs, each) for each in (1.0, 2.0))
    divided = 2 * (ones - twos)  # a of a / items + b
    if abs(divided) <= 1e-6 * abs(ones):
        return constant
    if scaled and abs(ones - divided) <= 1e-4 * abs(ones):
        return "tokens"
    if accumulation == 1:
        return "mixed"
    raise JobError(
        f"The loss of {type(model).__name__} is {'partly ' if scaled else ''}divided by the number of labels in the {accumulation} microbatches of a step"
        f"{' and partly not' if scaled else ', and by the number of microbatches, too'}, which no sum over a batch is. Use gradient_accumulation_steps=1 with a larger "
        "per_device_train_batch_size, and microbatches=... in the plan."
    )


def _tried(trainer: Any, model: nn.Module, inputs: Mapping[str, Any], items: float) -> float:
    with torch.no_grad(), preserved_draws(), Modes(model).evaluation():
        return float(trainer.compute_loss(model, dict(inputs), num_items_in_batch=torch.tensor(items)))


def sum_of(values: list[Tensor]) -> Tensor:
    """Their sum, in order."""
    total = values[0]
    for each in values[1:]:
        total = total + each
    return total
