"""The job's optimizers and schedulers, as one device makes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from meshloom.core.averaged import Averaged
from meshloom.core.job import Job


def made_by(
    job: Job, updated: Mapping[str, nn.Parameter]
) -> tuple[list[Optimizer], list[Any], list[Any], float | None]:
    """The optimizers of what is updated; the schedulers, by steps and by a metric; the decay of averages, if there are any."""
    made: Any = job.optimizer([(name, each) for name, each in updated.items() if each.requires_grad])
    decay = next((each.decay for each in _list_of(made) if isinstance(each, Averaged)), None)
    if decay is not None:
        made = [each.optimizer for each in made] if isinstance(made, list | tuple) else made.optimizer
    schedulers = _list_of(job.scheduler(made)) if job.scheduler else []
    given = job.evaluate.scheduler if job.evaluate else None
    by_metric = _list_of(given.scheduler(made)) if given else []
    return _list_of(made), [_stepped(each) for each in schedulers], by_metric, decay


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
