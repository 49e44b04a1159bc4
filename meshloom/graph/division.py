"""A job's loss divided over the ranks of one axis: a program per shape of batch, the same parts of the parameters in all.

The first program decides who holds what; later ones are divided so that it stays. One rank reads, chooses and tells the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshloom.comm.group import Group
from meshloom.comm.turns import Steps
from meshloom.comm.values import collect, on_first, share
from meshloom.errors import CaptureError, PlanError
from meshloom.graph.choose import Choice, Rates, choice_of_numbers, choose, numbers_of_choice, rates_for
from meshloom.graph.layout import layout_of
from meshloom.graph.loss_programs import LossPrograms, Shapes, alike, shapes_of, shapes_of_program
from meshloom.graph.partition import Partition, partition
from meshloom.graph.pieces import Pieces
from meshloom.graph.program import Program
from meshloom.graph.programs import Programs
from meshloom.graph.rules.table import rules_with
from meshloom.job import Job, LossFunction


class Division(LossPrograms):
    """The loss of `job` (and functions like it) over the ranks of `group`, which talk in it as they compute.

    team: all ranks of the replica, for decisions (CPU tensors). placements: as for `choose`. memory_bytes: what a rank may hold, of which there
    are `num_stages` along pp. rates: default is what was measured on the
    machine of the rank that chooses, else `default_rates`.
    """

    def __init__(
        self,
        job: Job,
        group: Group,
        team: Group,
        *,
        dtype: torch.dtype | None = None,
        rates: Rates | None = None,
        placements: Mapping[str, str] | None = None,
        memory_bytes: float | None = None,
        num_stages: int = 1,
    ) -> None:
        self._num_stages = num_stages
        self._job = job
        self._group = group
        self._team = team
        self._dtype = dtype
        self._given = rates
        self.rates: Rates | None = None  # that were used, on the rank that chose
        self._rules = rules_with(job.rules)
        self._placements = placements
        self._memory_bytes = memory_bytes
        self._programs: dict[LossFunction, Programs] = {}
        self._divided: dict[tuple[LossFunction, bool, Any], Partition] = {}
        self._first: Partition | None = None

    @property
    def summed(self) -> tuple[str, ...]:
        return self.first.summed

    @property
    def first(self) -> Partition:
        """The program that decided who holds what."""
        assert self._first is not None, "open() comes first"
        return self._first

    @property
    def pieces(self) -> Mapping[str, Pieces]:
        return {**self.first.parameters, **self.first.buffers}

    def open(self, batch: Any, world: Group, model: nn.Module) -> Steps[Shapes]:
        return (yield from self._divide(self._job.loss, True, batch, world, model))

    def ready(self, batch: Any, *, loss: LossFunction | None = None, training: bool = True) -> Steps[None]:
        function = loss or self._job.loss
        if (function, training, shapes_of(batch)) not in self._divided:
            yield from self._divide(function, training, batch, self._team)

    def program(self, shapes: Shapes, *, loss: LossFunction | None = None, training: bool = True) -> Program:
        return self._divided[loss or self._job.loss, training, shapes].programs[self._group.rank]

    def whole(self, shapes: Shapes, *, loss: LossFunction | None = None, training: bool = True) -> Program:
        return self._divided[loss or self._job.loss, training, shapes].choice.layout.program

    def _divide(self, loss: LossFunction, training: bool, batch: Any, group: Group, model: nn.Module | None = None) -> Steps[Shapes]:
        if loss not in self._programs:
            self._programs[loss] = Programs(replace(self._job, loss=loss), dtype=self._dtype)
        batches = alike(batch) if group.rank == 0 else None
        program = yield from self._programs[loss].read_together(group, batches, training=training, model=model)
        layout = layout_of(program, self._rules)
        held = self._first.held if self._first else None

        def chosen() -> Choice:
            limit = self._memory_bytes * self._num_stages if self._memory_bytes and held is None else None
            self.rates = self._given or rates_for(layout, self._group.size)
            try:
                return choose(layout, self._group.size, self.rates, held=held, placements=self._placements, memory_bytes=limit)
            except PlanError as error:
                if limit is None or self._num_stages == 1:
                    raise
                raise PlanError(f"{error} The limit is that of {self._num_stages} ranks along pp together; more of them help, too.") from None

        choice = yield from on_first(group, chosen, CaptureError)
        numbers: list[int] = yield from share(group, numbers_of_choice(choice) if choice else None)
        mine = choice or choice_of_numbers(layout, self._group.size, numbers, held=held, placements=self._placements)
        part = partition(mine)
        hashes = yield from collect(group, [each.digest() for each in part.programs])
        if any(each != hashes[0] for each in hashes):
            raise CaptureError("Ranks divided the same program differently. Use one version of meshloom, scipy and torch on all ranks.")
        self._first = self._first or part
        shapes = shapes_of_program(program)
        self._divided[loss, training, shapes] = part
        return shapes
