"""`meshloom.Averaged`: an optimizer that keeps moving averages of the parameters that it updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshloom.core.errors import JobError

_torch: Any = torch


class Averaged(Optimizer):
    """`optimizer`, with an exponential moving average of each of its parameters: after each step it becomes
    decay * average + (1 - decay) * parameter, beginning with the parameters after the first step. Raises `JobError`.

    A job's optimizer function returns it. Averages are of all trainable parameters; evaluations are of them, and checkpoints hold them. Several
    optimizers are wrapped each, with one decay. The scheduler function gets the optimizers within.

    Elsewhere it is an optimizer, whose attributes are those of the one within. Its `state_dict()` holds the averages.

    decay: between 0 and 1, like 0.999.

    >>> weight = torch.nn.Parameter(torch.zeros(()))
    >>> optimizer = Averaged(torch.optim.SGD([weight], lr=1.0), 0.75)
    >>> for _ in range(2):
    ...     weight.grad = torch.tensor(-1.0)
    ...     optimizer.step()
    >>> with optimizer.averages():
    ...     weight.item()
    1.25
    >>> weight.item()
    2.0
    """

    _step_supports_amp_scaling = False  # a GradScaler would tell this object what the one within asks for

    def __init__(self, optimizer: Optimizer, decay: float) -> None:  # pyright: ignore[reportMissingSuperCall]
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, Averaged):
            raise JobError(
                f"Averaged takes an optimizer of torch, like ml.Averaged(torch.optim.AdamW(named), 0.999), not a {type(optimizer).__name__}; of several, wrap each."
            )
        if not isinstance(decay, float) or not 0 < decay < 1:
            raise JobError(f"Averaged(..., decay={decay!r}) must be a number between 0 and 1, like 0.999.")
        self.optimizer, self.decay = optimizer, decay
        self._averages: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step the optimizer, and move the averages; what the optimizer's returns."""
        with torch.enable_grad():
            loss = self.optimizer.step(closure)
        parameters, known = self._parameters, len(self._averages)
        if known:
            _torch._foreach_lerp_(self._averages, parameters[:known], 1 - self.decay)
        self._averages += [each.clone() for each in parameters[known:]]
        return loss

    @contextmanager
    def averages(self) -> Iterator[None]:
        """A context in which parameters have the values of their averages, as for an evaluation."""
        parameters = self._parameters[: len(self._averages)]
        own = [each.clone() for each in parameters]
        _set(parameters, self._averages)
        try:
            yield
        finally:
            _set(parameters, own)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, with "averages": a list, in the order of the parameters."""
        return {**self.optimizer.state_dict(), "averages": list(self._averages)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there; from an optimizer's own without averages, which begin anew."""
        self.optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != "averages"})
        averages = state_dict.get("averages", ())
        self._averages = [torch.empty_like(each) for each in self._parameters[: len(averages)]]
        _set(self._averages, averages)

    @property
    def _parameters(self) -> list[Tensor]:
        return [each.detach() for group in self.optimizer.param_groups for each in group["params"]]


def _set(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
