"""Finds the parameters without gradient that a loss writes: a teacher's moving average.

The loss runs once, on one batch, before anything is shared or sliced; operators that write to memory of a frozen
parameter are seen as they run. The model is as before afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshloom.comm.objects import on_rank_0, share
from meshloom.comm.rank_context import RankContext
from meshloom.comm.steps import Steps
from meshloom.core.errors import DataError, JobError
from meshloom.core.job import Job
from meshloom.core.moments.current_step import Moment
from meshloom.core.plan import Plan
from meshloom.core.random import chunk_seed, preserved_draws
from meshloom.data.samples import first_batches
from meshloom.data.to_device import to_device
from meshloom.parameters.starting_model import StartingModel
from meshloom.program.capture.restored import restored
from meshloom.program.ir.schemas import arguments_of, is_written
from meshloom.program.ir.written_parameters import mark_written
from meshloom.replica.buffers.batch_norm import unsynchronised


def mark_what_is_written(
    job: Job, plan: Plan, context: RankContext, start: StartingModel, dtype: torch.dtype | None
) -> Steps[list[str]]:
    """Marks the frozen parameters that the loss writes, as rank 0 finds them; returns notes for the user."""
    model, unfilled = start.model, start.unfilled
    if all(each.requires_grad for each in model.parameters()):
        return []

    def find() -> list[str]:
        try:
            batches = first_batches(job, 1, plan.largest_share(job.batch_size)[0])
        except DataError:  # which training meets again
            return []
        data, moment = to_device(batches[0], context.device, dtype), Moment(chunk_seed(job.seed, 0, 0), 0)

        def loss() -> None:
            with moment.entered():
                for each in [each.loss for each in job.losses.values()] or [job.loss]:
                    each(model, data)

        return written_by_loss(model, loss, unfilled.standing_in if unfilled else nullcontext)

    names: list[str] = yield from share(context.world, (yield from on_rank_0(context.world, find, JobError)))
    mark_written(model, names)
    if not names:
        return []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [
        f"The loss writes {names[0]}{more}, which no gradient trains: every rank that uses them keeps them whole, each chunk reads them as the step "
        "found them, and what chunks write is merged in their order, as for buffers (docs/buffers.md)."
    ]


def written_by_loss(
    model: nn.Module, loss: Callable[[], Any], within: Callable[[], AbstractContextManager[Any]]
) -> list[str]:
    """Names of the parameters that are not trained and that `loss` writes; none if it cannot be run here, as its
    first step will then say why.

    within: the context that gives the model its values.
    """
    if all(each.requires_grad for each in model.parameters()):
        return []
    with ExitStack() as around:
        around.enter_context(within())
        around.enter_context(restored(model))
        around.enter_context(preserved_draws())
        around.enter_context(unsynchronised(model))
        writes = _Writes(model)
        try:
            with writes:
                loss()
        except Exception:  # whatever it is, training meets it again
            return []
        finally:
            writes.put_back()
        return [name for name, _ in model.named_parameters() if name in writes.found]


class _Writes(TorchDispatchMode):
    """Sees writes to frozen parameters, and keeps what they were."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: set[str] = set()
        self._frozen = {name: each for name, each in model.named_parameters() if not each.requires_grad}
        self._memory = {name: each.data for name, each in self._frozen.items()}  # if it gets other memory
        self._values: dict[str, Tensor] = {}  # of the written ones
        self._by_storage: dict[int, list[str]] = {}
        for name, each in self._frozen.items():
            self._by_storage.setdefault(_storage(each), []).append(name)
        self._trained = {each.data_ptr() for each in model.parameters() if each.requires_grad}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for operand in _written(func, args, kwargs):
            names = self._by_storage.get(_storage(operand), ())
            # parameters that stand in for others may lie in one memory
            exact = [name for name in names if self._memory[name].data_ptr() == operand.data_ptr()]
            if len(names) > 1 and operand.data_ptr() in self._trained:
                continue
            for name in exact or names:
                if name not in self.found:
                    self.found.add(name)
                    self._values[name] = self._memory[name].clone()
        return func(*args, **kwargs)

    def put_back(self) -> None:
        """The parameters have their memory and its values again."""
        for name, parameter in self._frozen.items():
            if parameter.data_ptr() != self._memory[name].data_ptr():
                self.found.add(name)
                parameter.data = self._memory[name]
            if name in self._values:
                self._memory[name].copy_(self._values[name])


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for argument, value in arguments_of(func, args, kwargs):
        if is_written(argument):
            yield from (
                each
                for each in (value if isinstance(value, list | tuple) else [value])
                if isinstance(each, Tensor)
            )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)
