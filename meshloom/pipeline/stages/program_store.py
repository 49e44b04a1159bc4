"""The programs that a rank runs: its stages of its shard, for the loss and every metric, mode and shape of batch.

captured on one rank -> sharded over tp -> cut into stages over pp     once per `ProgramKey`
sizes that a loss is indifferent to: computed from other sizes instead of captured (`program/sizes/any_size.py`)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from meshloom.comm.group import Group
from meshloom.comm.objects import on_rank_0, share
from meshloom.comm.pieces import Pieces
from meshloom.core.errors import CaptureError
from meshloom.core.job import Job, LossFunction
from meshloom.core.plan import Plan
from meshloom.pipeline.stages.stage_cutter import StageCutter
from meshloom.pipeline.stages.stages import Stage, with_places_behind_parts
from meshloom.program.cost.cost import costs
from meshloom.program.cost.opaque_shares import opaque_notes
from meshloom.program.cost.rates import Rates
from meshloom.program.ir.batch_values import fits
from meshloom.program.ir.leaves import Leaves, leaves_of
from meshloom.program.ir.program import Program
from meshloom.program.sizes.alike import alike
from meshloom.program.store.captured_loss import CapturedLoss, choices_of
from meshloom.program.store.fifo_cache import FifoCache
from meshloom.program.store.program_cache import ProgramCache
from meshloom.program.store.program_key import ProgramKey
from meshloom.program.store.stored_costs import cached_costs
from meshloom.program.store.unlifted import unlifted
from meshloom.program.trace.precision import default_precision
from meshloom.telemetry.timings import Timings
from meshloom.tensor_parallel.division import Division
from meshloom.tensor_parallel.search.choose import DivisionChoice

MOST_KEPT = 64  # programs whose stages are kept, besides those of a step


class ReadyBatch(NamedTuple):
    """A batch that has stages, by its key."""

    leaves: Leaves
    key: ProgramKey


class ProgramStore:
    """What one rank of a replica runs of `job`'s functions under `plan`.

    team: all ranks of the replica, for decisions (CPU tensors). division: over the ranks along tp; None: one.
    dtype: to which model and batches are lifted for verification; decisions are in the job's own precision.
    """

    def __init__(
        self, job: Job, plan: Plan, team: Group, division: Division | None = None, *, dtype: torch.dtype | None = None,
        rates: Rates | None = None, timings: Timings | None = None, stored: ProgramCache | None = None,
    ) -> None:  # fmt: skip
        self._timings = timings or Timings()
        self.cutter = StageCutter(job, plan, rates=rates, timings=self._timings, stored=stored)
        self.others: Mapping[str, str | None] = {}  # the first program's values of the batch besides tensors
        self._job, self._plan, self._team, self._division = job, plan, team, division
        self._dtype, self._stored = dtype, stored
        self._default = torch.get_default_dtype()
        # dtypes of a batch's tensors in the job's own precision, if it is lifted to another
        self._own_dtypes: dict[str, torch.dtype] = {}
        self._captured: dict[LossFunction, CapturedLoss] = {}
        self._entries: dict[ProgramKey, tuple[Stage, ...]] = FifoCache(MOST_KEPT + plan.microbatches)
        self._sharers: list[tuple[Stage, ...]] = []  # stages whose functions others share
        # by function, and whether it is trained
        self._divided: dict[tuple[LossFunction, bool], DivisionChoice] = {}
        # key of the tensors' shapes alone -> other values of batches that have programs
        self._others: dict[ProgramKey, list[Mapping[str, str | None]]] = {}

    def open(
        self, batches: Sequence[Any], world: Group, model: nn.Module, *, own: Any = None,
        loss: LossFunction | None = None, training: bool = True,
    ) -> tuple[Stage, ...]:  # fmt: skip
        """Captures the loss (the job's, unless it is given) on batches like the first, shards it, and cuts it. All ranks of `world`
        call this; batches and model count on its rank 0.

        batches: further ones are used for the capture if they have the same shapes.
        model: the job's, unsharded, as built; it stays unchanged.
        own: one of the batches in the job's own precision, if they were lifted to another.
        """
        if self._dtype is not None:  # any rank may have to capture a chunk of another size later
            names: dict[str, str] = share(
                world, {name: str(leaf.dtype) for name, leaf in leaves_of(own).tensors.items()}
            )
            self._own_dtypes = {name: getattr(torch, each.removeprefix("torch.")) for name, each in names.items()}  # fmt: skip
        key = self._capture(loss or self._job.loss, training, batches, world, model)
        return self.stages(key)

    def has(self, batch: Any, *, loss: LossFunction, training: bool) -> bool:
        """Whether batches like this one have stages."""
        key = self._key(leaves_of(batch), loss, training)
        return key is not None and key in self._entries

    def follows(self, batch: Any, *, loss: LossFunction, training: bool) -> bool:
        """Whether batches like this one have stages, or get them now from those of other sizes: nothing is captured. The replica's ranks all
        pass the same batch."""
        if not self.has(batch, loss=loss, training=training):
            program = self._of(loss).made_of(leaves_of(batch), training=training)
            if program is None:
                return False
            self._add_made(program, loss)
        return True

    def ready(self, batch: Any, *, loss: LossFunction | None = None, training: bool = True) -> ReadyBatch:
        """Makes sure that batches like this one have stages. The replica's ranks all pass the same batch."""
        loss, leaves = loss or self._job.loss, leaves_of(batch)
        key = self._key(leaves, loss, training)
        if key is not None and key in self._entries:
            if len(self._entries) >= MOST_KEPT:
                self._entries[key] = self._entries.pop(key)  # the last to be evicted
            return ReadyBatch(leaves, key)
        program = self._of(loss).at_any_size(self._team, batch, training=training)
        if program is None:
            return ReadyBatch(leaves, self._capture(loss, training, [batch], self._team))
        return ReadyBatch(leaves, self._add_made(program, loss))

    def stages(self, key: ProgramKey) -> tuple[Stage, ...]:
        """All stages of this rank's shard, for batches that are ready."""
        return self._entries[key]

    def division_of(self, loss: LossFunction, *, training: bool) -> DivisionChoice | None:
        """How the newest program of a loss in this mode, or else the other, is divided: for programs of any size. None: one rank along tp."""
        return next(
            (found for mode in (training, not training) if (found := self._divided.get((loss, mode)))), None
        )

    @property
    def pieces(self) -> Mapping[str, Pieces]:
        """The shards of all parameters and buffers along tp; those that are not named are replicated."""
        return self._division.pieces if self._division else {}

    @property
    def summed(self) -> tuple[str, ...]:
        """Parameters whose gradients are summed over tp, once a step."""
        return self._division.summed if self._division else ()

    @property
    def opaque(self) -> Mapping[str, str]:
        """Leaves, which programs run as they are, and why."""
        return {path: why for each in self._captured.values() for path, why in each.opaque.items()}

    def opaque_notes(self) -> list[str]:
        """Which modules training runs as they are, why, and how much of the model they are."""
        first = [each for each in self._of(self._job.loss).programs[:1] if each.opaque]
        return [
            note for each in first for note in opaque_notes(each, cached_costs(self._stored, each, costs))
        ]

    def told(self) -> str | None:
        """How many captures served which sizes, for people; None: it was captured once."""
        return told_of_captures(self._captured.values())

    def _key(self, leaves: Leaves, loss: LossFunction, training: bool) -> ProgramKey | None:
        """The key of a batch; None: there is no program for its values besides tensors."""
        key = ProgramKey(loss, training, leaves.shapes)
        if not leaves.values:
            return key
        found = next((others for others in self._others.get(key, ()) if fits(others, leaves.values)), None)
        return None if found is None else key._replace(shapes=(*key.shapes, *found.items()))

    def _of(self, loss: LossFunction) -> CapturedLoss:
        if loss not in self._captured:
            self._captured[loss] = CapturedLoss(replace(self._job, loss=loss), dtype=self._dtype, timings=self._timings, stored=self._stored)  # fmt: skip
        return self._captured[loss]

    def _sharing(self, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        """These stages, with the compiled functions of those that are equal except for sizes."""
        known = next((each for each in self._sharers if alike(each, stages)), None)
        if known is None:
            known = tuple(replace(each, program=replace(each.program, shared={})) for each in stages)
            self._sharers.append(known)
        return tuple(
            replace(each, program=replace(each.program, shared=other.program.shared))
            for each, other in zip(stages, known, strict=True)
        )

    def _add_made(self, program: Program, loss: LossFunction) -> ProgramKey:
        key = self._add(program, loss, self._team)
        self._entries[key] = self._sharing(self._entries[key])
        return key

    def _capture(
        self, loss: LossFunction, training: bool, batches: Sequence[Any], group: Group, model: nn.Module | None = None,
    ) -> ProgramKey:  # fmt: skip
        choices = on_rank_0(group, lambda: choices_of(batches), CaptureError) or []
        captured = self._of(loss)
        program = captured.capture_together(group, choices, training=training, model=model)
        own: Program | None = None
        if self._dtype is not None and not self.cutter.has_cut(program):
            job = replace(self._job, loss=loss)

            def in_own_precision() -> Program | None:
                with default_precision(self._default):
                    return unlifted(program, job, batches[0], self._own_dtypes, self._stored)

            own = on_rank_0(group, in_own_precision, CaptureError)
        return self._add(program, loss, group, own)

    def _add(
        self, program: Program, loss: LossFunction, group: Group, own: Program | None = None
    ) -> ProgramKey:
        """Shards and cuts a program. own: the same program in the job's own precision, if it is lifted to
        another; decisions are made for it."""
        key = ProgramKey.of_program(loss, program)
        if key in self._entries:
            return key
        program = with_places_behind_parts(program, self._plan.num_stages)
        own = own and with_places_behind_parts(own, self._plan.num_stages)
        part, routed = program, {}
        if self._division:
            part, routed = self._division.part(program, group, own)
            assert self._division.newest
            self._divided[loss, program.training] = self._division.newest
        self._entries[key] = self.cutter.cut(program, part, routed, group, own)
        self.others = self.others if len(self._entries) > 1 else program.others
        known = self._others.setdefault(key.tensors_only(len(program.others)), [])
        if program.others not in known:
            known.append(program.others)
        return key


def told_of_captures(captured: Collection[CapturedLoss]) -> str | None:
    """As `ProgramStore.told`."""
    found = [each for captures in captured for each in captures.size_notes()]
    number = sum(each.num_captured for each in captured)
    times = f"{number} times" if number > 1 else "once"
    return f"The loss was captured {times}: {'; '.join(found)}." if found else None
