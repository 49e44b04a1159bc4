"""A job's loss as programs that nobody divides: each rank has all of it, or some stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshloom.comm.group import Group
from meshloom.comm.turns import Steps
from meshloom.graph.loss_programs import LossPrograms, Shapes, alike, shapes_of, shapes_of_program
from meshloom.graph.pieces import Pieces
from meshloom.graph.program import Program
from meshloom.graph.programs import Programs
from meshloom.job import Job, LossFunction


class Undivided(LossPrograms):
    """The loss of `job`, and functions like it. team: all ranks of the replica, for decisions (CPU tensors)."""

    def __init__(self, job: Job, team: Group, *, dtype: torch.dtype | None = None) -> None:
        self._job = job
        self._team = team
        self._dtype = dtype
        self._programs: dict[LossFunction, Programs] = {}
        self._known: dict[tuple[LossFunction, bool, Shapes], Program] = {}

    def open(self, batch: Any, world: Group, model: nn.Module) -> Steps[Shapes]:
        return (yield from self._read(self._job.loss, True, batch, world, model))

    def ready(self, batch: Any, *, loss: LossFunction | None = None, training: bool = True) -> Steps[None]:
        function = loss or self._job.loss
        if (function, training, shapes_of(batch)) not in self._known:
            yield from self._read(function, training, batch, self._team)

    def program(self, shapes: Shapes, *, loss: LossFunction | None = None, training: bool = True) -> Program:
        return self._known[loss or self._job.loss, training, shapes]

    def whole(self, shapes: Shapes, *, loss: LossFunction | None = None, training: bool = True) -> Program:
        return self.program(shapes, loss=loss, training=training)

    @property
    def pieces(self) -> Mapping[str, Pieces]:
        return {}

    @property
    def summed(self) -> tuple[str, ...]:
        return ()

    def _read(self, loss: LossFunction, training: bool, batch: Any, group: Group, model: nn.Module | None = None) -> Steps[Shapes]:
        if loss not in self._programs:
            self._programs[loss] = Programs(replace(self._job, loss=loss), dtype=self._dtype)
        batches = alike(batch) if group.rank == 0 else None
        program = yield from self._programs[loss].read_together(group, batches, training=training, model=model)
        shapes = shapes_of_program(program)
        self._known[loss, training, shapes] = program
        return shapes
