"""Batches with what their chunks draw with `random` and numpy: one rank finds the ways that a loss may go, and every
rank follows them for its chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.comm.objects import on_rank_0, share
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.steps import Steps, run_in_steps
from meshloom.core.errors import CaptureError
from meshloom.core.job import Job, LossFunction
from meshloom.core.moments.current_step import Moment
from meshloom.program.capture.shapes import paths_by_shapes
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.ir.lines import WAY_OUT
from meshloom.program.python_draws.explore import EXAMPLE, DrawnBatch, loss_of_path, may_draw
from meshloom.program.python_draws.paths import Path
from meshloom.program.store.program_key import ProgramKey


class DrawnBatches:
    """Of `job`'s functions. group: the ranks that compute a chunk together. dtype: to which model and batches are
    lifted."""

    def __init__(self, job: Job, group: Group, dtype: torch.dtype | None) -> None:
        self._job, self._group, self._dtype = job, group, dtype
        self._model: nn.Module
        self._may: dict[LossFunction, bool] = {}
        self._paths: dict[ProgramKey, list[tuple[Path, LossFunction]]] = {}
        self._losses: dict[tuple[LossFunction, str], LossFunction] = {}

    def opened(
        self, model: nn.Module, lists: Sequence[list[Any]], world: Group, loss: LossFunction
    ) -> Steps[Sequence[list[Any]]]:
        """These lists of batches of rank 0, the first to capture `loss` with, for the way on which it computes the
        most; on other ranks the first holds the loss alone."""
        self._model = model
        if not self._draws(loss):
            return lists
        first = next(iter(lists[0]), None)
        texts = yield from self._found_together(world, loss, first, True)
        if not texts:
            self._may[loss] = False
            return lists
        path, followed = Path.parse(texts[0]), self._loss(loss, texts[0])

        def drawn(batch: Any, number: int) -> DrawnBatch:
            inputs = path.inputs(replace(EXAMPLE, seed=number), whatever=True)
            return _with_inputs(followed, batch, inputs or [])

        found = [[drawn(batch, number) for number, batch in enumerate(batches)] for batches in lists]
        return found if found[0] else [[DrawnBatch(followed, None, [])], *found[1:]]

    def all_drawn(self, batches: Sequence[tuple[Any, Moment]], loss: LossFunction) -> Steps[list[Any]]:
        """`with_draws` of chunks of a loss, each with its moment."""
        found: list[Any] = []
        for batch, moment in batches:
            found.append((yield from self.with_draws(batch, moment, loss)))
        return found

    def with_draws(
        self, batch: Any, moment: Moment, loss: LossFunction, *, training: bool = True
    ) -> Steps[Any]:
        """A batch with what `loss` draws at `moment`, if it draws. The ranks of the group all pass the same."""
        if not self._draws(loss):
            return batch
        key = ProgramKey.of_tensors(loss, batch, training=training)
        if key not in self._paths:
            texts = yield from self._found_together(self._group, loss, batch, training)
            self._paths[key] = [(Path.parse(text), self._loss(loss, text)) for text in texts]
        if not self._paths[key]:
            return batch
        for path, followed in self._paths[key]:
            inputs = path.inputs(moment)
            if inputs is not None:
                return _with_inputs(followed, batch, inputs)
        raise CaptureError(
            f"In step {moment.step} random or numpy drew what leads the loss where it failed when it was tried out. {WAY_OUT}"
        )

    def _draws(self, loss: LossFunction) -> bool:
        if loss not in self._may:
            self._may[loss] = may_draw(loss, self._model)
        return self._may[loss]

    def _found_together(
        self, group: Group, loss: LossFunction, batch: Any, training: bool
    ) -> Steps[list[str]]:
        texts = yield from on_rank_0(group, lambda: self._found(loss, batch, training), CaptureError)
        return (yield from share(group, texts))

    def _found(self, loss: LossFunction, batch: Any, training: bool) -> list[str]:
        job = replace(self._job, loss=loss)
        return [path.text for path in paths_by_shapes(job, batch, training=training, dtype=self._dtype)]

    def _loss(self, loss: LossFunction, text: str) -> LossFunction:
        return self._losses.setdefault((loss, text), loss_of_path(loss, Path.parse(text)))


def _with_inputs(followed: LossFunction, batch: Any, inputs: list[Tensor]) -> DrawnBatch:
    """Where the batch lies."""
    device = leaves_of(batch).device
    return DrawnBatch(followed, batch, [each.to(device or each.device) for each in inputs])


def drawn_alone(
    job: Job, model: nn.Module, batches: list[Any], dtype: torch.dtype | None = None
) -> list[Any]:
    """`DrawnBatches.opened` of one list, where no other ranks are."""
    here = simulated_groups(1)[0]
    opened = DrawnBatches(job, here, dtype).opened(model, [batches], here, job.loss)
    (found,) = run_in_steps([opened])[0]
    return found


def loss_of(batch: Any, loss: LossFunction) -> LossFunction:
    """The loss of a batch that may be drawn. loss: of one that is not."""
    return batch.loss if isinstance(batch, DrawnBatch) else loss
