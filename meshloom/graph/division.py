"""A job's loss divided over the ranks of one axis: a program per shape of batch, the same parts of the parameters in all.

The first program decides who holds what; later ones are divided so that it stays. One rank reads, chooses and tells the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.comm.turns import Steps
from meshloom.comm.values import collect, on_first, share
from meshloom.errors import CaptureError
from meshloom.graph.choose import Choice, Rates, choice_of_numbers, choose, numbers_of_choice, rates_for
from meshloom.graph.landed import with_landing
from meshloom.graph.landing import Landing
from meshloom.graph.layout import layout_of
from meshloom.graph.leaves import leaves_of
from meshloom.graph.partition import Partition, partition
from meshloom.graph.pieces import Pieces
from meshloom.graph.program import Program
from meshloom.graph.programs import Programs
from meshloom.graph.rules.table import rules_with
from meshloom.graph.traffic import sent_in_chunk
from meshloom.job import Job, LossFunction


class Division:
    """The loss of `job` (and functions like it) over the ranks of `group`, which talk in it as they compute.

    team: the same ranks, for decisions (CPU tensors). placements, memory_bytes: as for `choose`. rates: default is what was measured on the
    machine of the rank that chooses, else `default_rates`. landing: who takes the gradients of linear layers' weights; None: autograd.
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
        landing: Landing | None = None,
    ) -> None:
        self._job = job
        self._group = group
        self._team = team
        self._dtype = dtype
        self._given = rates
        self.rates: Rates | None = None  # that were used, on the rank that chose
        self._rules = rules_with(job.rules)
        self._placements = placements
        self._memory_bytes = memory_bytes
        self._landing = landing
        self._programs: dict[LossFunction, Programs] = {}
        self._divided: dict[tuple[LossFunction, bool, Any], Partition] = {}
        self._run: dict[tuple[LossFunction, bool, Any], Program] = {}  # this rank's, as it is run
        self._sent: dict[tuple[LossFunction, bool, Any], Mapping[str, int]] = {}
        self._first: Partition | None = None

    @property
    def first(self) -> Partition:
        """The program that decided who holds what."""
        assert self._first is not None, "open() comes first"
        return self._first

    @property
    def parameters(self) -> Mapping[str, Pieces]:
        """Who holds what of every parameter."""
        return self.first.parameters

    @property
    def buffers(self) -> Mapping[str, Pieces]:
        """Who holds what of every buffer."""
        return self.first.buffers

    @property
    def changing(self) -> frozenset[str]:
        """Names of the buffers that running the loss changes."""
        program = self.first.choice.layout.program
        return program.in_place | program.updates.keys()

    def open(self, batch: Any, world: Group, model: nn.Module) -> Steps[None]:
        """Read the loss of batches like `batch` and decide who holds what. All ranks of `world` call it; batch and model count on its rank 0.

        model: the job's, whole, as it was built; it stays as it is.
        """
        yield from self._divide(self._job.loss, True, batch, world, model)

    def ready(self, batch: Any, *, loss: LossFunction | None = None, training: bool = True) -> Steps[None]:
        """Make sure that batches like `batch` can be run. All ranks of the group call it with the same batch."""
        function = loss or self._job.loss
        if (function, training, _shapes(batch)) not in self._divided:
            yield from self._divide(function, training, batch, self._team)

    def run(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        batch: Any,
        *,
        loss: LossFunction | None = None,
        training: bool = True,
    ) -> Any:
        """What the loss (or `loss`) returns for `batch`; parameters, buffers: this rank's parts by name. Batches like it are ready."""
        program = self._run[loss or self._job.loss, training, _shapes(batch)]
        return program.run(parameters, buffers, batch, group=self._group)

    def bytes_of_chunk(self, batch: Any, *, loss: LossFunction | None = None, training: bool = True) -> Mapping[str, int]:
        """Bytes that this rank hands to each kind of collective when `run` runs, and its backward if it is a training program's."""
        key = loss or self._job.loss, training, _shapes(batch)
        if key not in self._sent:
            found: Counter[str] = Counter()
            for each in sent_in_chunk(self._divided[key].programs[self._group.rank], self._group.rank):
                found[each.collective] += each.num_bytes
            self._sent[key] = found
        return self._sent[key]

    def _divide(self, loss: LossFunction, training: bool, batch: Any, group: Group, model: nn.Module | None = None) -> Steps[None]:
        if loss not in self._programs:
            self._programs[loss] = Programs(replace(self._job, loss=loss), dtype=self._dtype)
        batches = _alike(batch) if group.rank == 0 else None
        program = yield from self._programs[loss].read_together(group, batches, training=training, model=model)
        layout = layout_of(program, self._rules)
        held = self._first.held if self._first else None

        def chosen() -> Choice:
            limit = self._memory_bytes if held is None else None
            self.rates = self._given or rates_for(layout, self._group.size)
            return choose(layout, self._group.size, self.rates, held=held, placements=self._placements, memory_bytes=limit)

        choice = yield from on_first(group, chosen, CaptureError)
        numbers: list[int] = yield from share(group, numbers_of_choice(choice) if choice else None)
        mine = choice or choice_of_numbers(layout, self._group.size, numbers, held=held, placements=self._placements)
        part = partition(mine)
        hashes = yield from collect(group, [each.digest() for each in part.programs])
        if any(each != hashes[0] for each in hashes):
            raise CaptureError("Ranks divided the same program differently. Use one version of meshloom, scipy and torch on all ranks.")
        self._first = self._first or part
        key = loss, training, tuple((each.name, each.meta.shape, each.meta.dtype) for each in program.inputs)
        mine = part.programs[self._group.rank]
        self._divided[key] = part
        self._run[key] = with_landing(mine, self._landing) if self._landing and training else mine


def _shapes(batch: Any) -> Any:
    return tuple((name, tuple(leaf.shape), leaf.dtype) for name, leaf in leaves_of(batch).tensors.items())


def _alike(batch: Any) -> list[Any]:
    """The batch, and another of the same shapes: its samples one place on."""
    leaves = leaves_of(batch)
    return [batch, leaves.rebuild([leaf.roll(1, 0) if leaf.ndim else leaf for leaf in leaves.tensors.values()])]
