"""The losses that the reference trains, each with its own optimizers and schedulers, and whose turn it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from meshloom.core.job import Job
from meshloom.core.objectives import Objective
from meshloom.verify.reference.masters import ReferenceMasters


@dataclass(frozen=True, kw_only=True)
class TrainedLoss:
    """One of them. name: "" if there is one. names: of its parameters. updates, every: as of an `Objective`. draws: losses computed before it in
    a step, if all are due."""

    name: str
    loss: Callable[[Any, Any], Any]
    names: frozenset[str]
    optimizers: list[Optimizer]
    schedulers: list[Any]
    clip_grad_norm: float | None
    updates: int = 1
    every: int = 1
    draws: int = 0


def trained_losses(job: Job, model: nn.Module | ReferenceMasters) -> list[TrainedLoss]:
    """Those of a job, of its model, or of what is updated in place of its parameters."""
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    alone = Objective(
        loss=job.loss,
        optimizer=job.optimizer,
        parameters=lambda name: True,
        scheduler=job.scheduler,
        clip_grad_norm=job.clip_grad_norm,
    )
    found: list[TrainedLoss] = []
    for loss, each in (job.losses or {"": alone}).items():
        own = [(name, parameter) for name, parameter in named if _trains(each, name)]
        made = each.optimizer(own)
        found.append(
            TrainedLoss(
                name=loss,
                loss=each.loss,
                names=frozenset(name for name, _ in own),
                optimizers=_list_of(made),
                schedulers=_schedulers(each.scheduler, made),
                clip_grad_norm=each.clip_grad_norm,
                updates=each.updates,
                every=each.every,
                draws=sum(other.updates for other in found),
            )
        )
    return found


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step` cannot do without one, as LBFGS's."""
    given = inspect.signature(type(optimizer).step).parameters.get("closure")
    return given is not None and given.default is inspect.Parameter.empty


def densify_gradients(optimizer: Optimizer) -> None:
    """Others than SparseAdam compute the same from dense gradients, if they accept sparse ones at all."""
    if isinstance(optimizer, SparseAdam):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()


def turns(
    losses: list[TrainedLoss], batches: Iterable[list[Any]], start: int = 0
) -> Iterator[tuple[int, list[Any], TrainedLoss, int]]:
    """Step after step the turns of each: the step, its batch, the loss, and the number of its draws. start: number of the first
    batch."""
    for step, batch in enumerate(batches, start):
        for each in losses:
            if step % each.every == each.every - 1:
                for repeated in range(each.updates):
                    yield step, batch, each, each.draws + repeated


def is_meant(text: str, name: str) -> bool:
    """Whether a text means the parameter of this name: as its whole name, as that of a module around it, or as a pattern.

    >>> is_meant("block1", "block1.weight"), is_meant("block1", "block10.weight"), is_meant("*.bias", "block1.bias")
    (True, False, True)
    """
    path = name.split(".")
    return text in {".".join(path[:depth]) for depth in range(1, len(path) + 1)} or fnmatchcase(name, text)


def _trains(objective: Objective, name: str) -> bool:
    given = objective.parameters
    if callable(given):
        return bool(given(name))
    return any(is_meant(text, name) for text in ([given] if isinstance(given, str) else given))


def _schedulers(function: Callable[[Any], Any] | None, made: Any) -> list[Any]:
    return [_stepped(each) for each in _list_of(function(made))] if function else []


def _stepped(given: Any) -> Any:
    is_function = callable(given) and not hasattr(given, "step") and not isinstance(given, type)
    return _FunctionOfStep(given) if is_function else given


class _FunctionOfStep:
    """A function that is called with a step's number before that step."""

    def __init__(self, function: Callable[[int], object]) -> None:
        self._function, self._next = function, 0
        function(0)

    def step(self) -> None:
        self._next += 1
        self._function(self._next)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._next}


def _list_of(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def rows_of(gradient: Tensor, like: Tensor) -> Tensor:
    """A gradient as a sparse one; a dense one with the rows of `like`."""
    if gradient.is_sparse:
        return gradient.detach().to(like.device)
    indices = like.coalesce().indices()
    values = gradient.detach().to(like.device)[tuple(indices)]
    return torch.sparse_coo_tensor(indices, values, like.shape, check_invariants=False).coalesce()
