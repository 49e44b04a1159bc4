"""`meshloom.step()` as an input of programs: the number of the step as a tensor of no dims, on which Python's arithmetic, `min` and `max` stay.

It is of float64, in which Python computes, and beside tensors with dims it counts as a number does: it leaves their precision as it is.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from meshloom.core.moments.current_step import answered_by, step
from meshloom.program.ir.replaced import replaced

STEP = "meshloom.step"  # its name among a program's inputs


def step_tensor(device: torch.device | None = None) -> Tensor:
    """The number of the step that is being computed."""
    return torch.tensor(step(), dtype=torch.float64, device=device)


def step_beside(tensors: Sequence[Tensor]) -> Tensor:
    """An example of the input, without a value where these have none."""
    first = tensors[0]
    with first.fake_mode if isinstance(first, FakeTensor) else nullcontext():
        return torch.ones((), dtype=torch.float64, device=first.device)


@contextmanager
def answered_by_input(tensor: Tensor) -> Iterator[None]:
    """A context in which this thread's `meshloom.step()` is an input, and Python's `min` and `max` of tensors without dims are operators."""
    with (
        answered_by(step=lambda: tensor),
        replaced(builtins, "min", _of_tensors(min, torch.minimum, "max")),
        replaced(builtins, "max", _of_tensors(max, torch.maximum, "min")),
    ):
        yield


def _of_tensors(builtin: Any, of_two: Callable[[Any, Any], Tensor], bound: str) -> Callable[..., Any]:
    def both(one: Any, other: Any) -> Any:
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return of_two(one, other)
        tensor, number = (one, other) if isinstance(one, Tensor) else (other, one)
        return tensor.clamp(**{bound: number})

    def chosen(*args: Any, **settings: Any) -> Any:
        given = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
        tensors = [each for each in given if isinstance(each, Tensor) and not each.ndim]
        numbers = [each for each in given if isinstance(each, int | float)]
        if settings or not tensors or len(tensors) + len(numbers) != len(given):
            return builtin(*args, **settings)
        return reduce(both, [*tensors, *([builtin(numbers)] if numbers else [])])

    return chosen
