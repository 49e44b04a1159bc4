"""Optimizers that look at more than single elements step on whole parameters, of which ranks have parts in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar, cast

import torch
from torch.optim import Optimizer

from meshloom.core.errors import JobError
from meshloom.loops.execution import Execution
from meshloom.loops.part_tensor import PartTensor, whole_tensor

Stepping = TypeVar("Stepping", bound=Optimizer)


def with_whole_steps(optimizer: Stepping, executions: Callable[[Optimizer], Sequence[Execution]]) -> Stepping:
    """The optimizer, whose parameters, gradients and state are whole in its steps, and parts in the closures that these call. executions: of the modules
    whose parameters an optimizer updates. Raises `JobError` where something else stands in the place of its step."""
    if "step" in vars(optimizer):
        raise JobError(
            f"Another step stands in the place of that of {type(optimizer).__name__}, such as a scheduler's. Call ml.whole(optimizer) before making the scheduler."
        )
    for state in optimizer.state.values():
        state.update({key: whole_tensor(each) for key, each in state.items() if isinstance(each, PartTensor)})
    original: Any = type(optimizer)

    def step(self: Optimizer, closure: Callable[[], Any] | None = None, **given: Any) -> Any:
        with ExitStack() as around:

            def enter() -> None:
                for each in executions(self):
                    around.enter_context(each.whole())

            def in_parts() -> Any:
                around.close()
                try:
                    return cast(Any, closure)()
                finally:
                    with torch.no_grad():
                        enter()

            enter()
            return original.step(self, **given) if closure is None else original.step(self, in_parts, **given)

    cast(Any, step).hooked = True  # the class's own calls the hooks
    names = {"step": step, "__module__": original.__module__, "__doc__": original.__doc__}
    optimizer.__class__ = type(original.__name__, (original,), names)
    return optimizer
