"""The programs of a job's loss, and of functions like it: one per function, mode and shape of batch, whole
and this rank's part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from meshloom.comm.group import Group
from meshloom.comm.objects import on_first, share
from meshloom.comm.pieces import Pieces
from meshloom.comm.steps import Steps
from meshloom.core.errors import CaptureError
from meshloom.core.job import Job, LossFunction
from meshloom.core.timings import Timings
from meshloom.program.capture.unlifted import unlifted
from meshloom.program.ir.batch_values import fits
from meshloom.program.ir.leaves import Leaves, leaves_of
from meshloom.program.ir.program import Program
from meshloom.program.sizes.any_size import AnySize
from meshloom.program.sizes.forms import alike
from meshloom.program.store.newest import Newest
from meshloom.program.store.programs import Programs
from meshloom.program.store.stored import Stored
from meshloom.program.trace.precision import default_precision
from meshloom.tensor_parallel.division import Division
from meshloom.tensor_parallel.partition import RoutedRows

# Of a batch's tensors, by name; and what else it holds that programs are for, by name.
Shapes = tuple[tuple[str, tuple[int, ...], torch.dtype] | tuple[str, str | None], ...]

MOST_KEPT = 64  # shapes of batches whose programs are kept divided


@dataclass(frozen=True, kw_only=True)
class _Known:
    """What there is for batches of some shapes. part: this rank's; priced: the whole one by which it is
    decided; routed: values of the part."""

    whole: Program
    part: Program
    priced: Program
    routed: Mapping[str, RoutedRows]


class LossPrograms:
    """What one rank of a replica runs of `job`'s loss.

    team: all ranks of the replica, for decisions (CPU tensors). division: over the ranks along tp; None: each
    rank's part is the whole. dtype: precision that model and batches are lifted to, for verification; what is
    chosen is chosen as in the job's own.
    """

    def __init__(
        self, job: Job, team: Group, division: Division | None = None, *, dtype: torch.dtype | None = None, timings: Timings | None = None,
        stored: Stored | None = None,
    ) -> None:  # fmt: skip
        self.division = division
        self._stored = stored
        self._timings = timings or Timings()
        self._job = job
        self._team = team
        self._dtype = dtype
        self._default = torch.get_default_dtype()
        # of a batch's tensors in the job's own precision, where it is lifted to another
        self._own_dtypes: dict[str, torch.dtype] = {}
        self._readers: dict[LossFunction, Programs] = {}
        self._known: dict[tuple[LossFunction, bool, Shapes], _Known] = Newest(MOST_KEPT)
        # by the shapes of the tensors alone
        self._others: dict[tuple[LossFunction, bool, Shapes], list[Mapping[str, str | None]]] = {}

    def open(
        self, batches: Sequence[Any], world: Group, model: nn.Module, *, own: Any = None
    ) -> Steps[Shapes]:
        """Read the loss of batches like the first and decide who holds what; their shapes. All ranks of
        `world` call it; batches and model count on its rank 0.

        batches: further ones of the job, to read the loss with if they have the same shapes. model: the
        job's, whole, as it was built; it stays as it is. own: one of the batches in the job's own precision,
        if they were lifted to another.
        """
        if self._dtype is not None:  # any rank may have to read a chunk of another size later
            names: dict[str, str] = yield from share(
                world, {name: str(leaf.dtype) for name, leaf in leaves_of(own).tensors.items()}
            )
            self._own_dtypes = {
                name: getattr(torch, each.removeprefix("torch.")) for name, each in names.items()
            }
        return (yield from self._read(self._job.loss, True, batches, world, model))

    def ready(self, batch: Any, *, loss: LossFunction | None = None, training: bool = True) -> Steps[None]:
        """Make sure that there are programs for batches like `batch`. All ranks of the replica call it with
        the same batch."""
        function = loss or self._job.loss
        shapes = self.shapes_of(batch, loss=function, training=training)
        if shapes is not None and (function, training, shapes) in self._known:
            return
        reader = self._reader(function)
        proved = self.proved(batch, loss=function, training=training)
        if proved is None:
            proved = yield from reader.prove_together(self._team, batch, training=training)
        program = proved.program(leaves_of(batch)) if proved else None
        if proved is None or program is None:
            yield from self._read(function, training, [batch], self._team)
            return
        for each in (*proved.points, program):
            yield from self._take(each, function, training, self._team)

    def proved(
        self, batch: Any, *, loss: LossFunction | None = None, training: bool = True
    ) -> AnySize | None:
        """What was proved of programs of any size, for batches like `batch`."""
        return self._reader(loss or self._job.loss).of_any_size(batch, training=training)

    @property
    def num_read(self) -> int:
        """Programs that were read."""
        return sum(each.num_read for each in self._readers.values())

    def told(self) -> str | None:
        """How many readings served which sizes, for people; None: each loss was read once."""
        found = [each for reader in self._readers.values() for each in reader.told()]
        times = f"{self.num_read} times" if self.num_read > 1 else "once"
        return f"The loss was read {times}: {'; '.join(found)}." if found else None

    def shapes_of(
        self, batch: Any, *, loss: LossFunction | None = None, training: bool = True
    ) -> Shapes | None:
        """What decides which program a batch needs; None if none was read yet for what it holds besides
        tensors."""
        leaves = leaves_of(batch)
        tensors = shapes_of(leaves)
        if not leaves.values:
            return tensors
        known = self._others.get((loss or self._job.loss, training, tensors), ())
        found = next((others for others in known if fits(others, leaves.values)), None)
        if found is None:
            proved = self.proved(batch, loss=loss, training=training)  # for values like these
            found = proved.points[0].others if proved else None
        return tensors + tuple(found.items()) if found is not None else None

    def shapes_of_program(self, program: Program) -> Shapes:
        """Of the batches that it is for."""
        tensors: Shapes = tuple(
            (each.name, each.meta.shape, each.meta.dtype)
            for each in program.inputs
            if each.name not in program.others
        )
        return tensors + tuple(program.others.items())

    def whole(self, shapes: Shapes, *, loss: LossFunction | None = None, training: bool = True) -> Program:
        """The program for batches of these shapes, which are ready."""
        return self._known[loss or self._job.loss, training, shapes].whole

    def program(self, shapes: Shapes, *, loss: LossFunction | None = None, training: bool = True) -> Program:
        """This rank's part of it."""
        return self._known[loss or self._job.loss, training, shapes].part

    def priced(self, shapes: Shapes, *, loss: LossFunction | None = None, training: bool = True) -> Program:
        """The whole program as it is in training, with the same nodes: by this one it is decided, on the rank
        that does."""
        return self._known[loss or self._job.loss, training, shapes].priced

    def routed(
        self, shapes: Shapes, *, loss: LossFunction | None = None, training: bool = True
    ) -> Mapping[str, RoutedRows]:
        """Of its values those whose rows data sends to this rank: nobody else knows how many there are."""
        return self._known[loss or self._job.loss, training, shapes].routed

    @property
    def pieces(self) -> Mapping[str, Pieces]:
        """Who holds what of every parameter and buffer along tp; what is not named is whole."""
        return self.division.pieces if self.division else {}

    @property
    def summed(self) -> tuple[str, ...]:
        """Parameters whose gradients are to be summed over tp, once a step."""
        return self.division.first.summed if self.division else ()

    def _read(
        self,
        loss: LossFunction,
        training: bool,
        batches: Sequence[Any],
        group: Group,
        model: nn.Module | None = None,
    ) -> Steps[Shapes]:
        pairs = _pairs(batches) if group.rank == 0 else []
        program = yield from self._reader(loss).read_together(group, pairs, training=training, model=model)
        own: Program | None = None
        # else what was chosen for those holds
        if self._dtype is not None and not self._is_known_at_other_sizes(program, loss, training):
            own = yield from on_first(
                group,
                lambda: self._unlifted(program, replace(self._job, loss=loss), batches[0]),
                CaptureError,
            )
        return (yield from self._take(program, loss, training, group, own))

    def _is_known_at_other_sizes(self, program: Program, loss: LossFunction, training: bool) -> bool:
        known = (
            each.whole
            for (function, mode, _), each in self._known.items()
            if (function, mode) == (loss, training)
        )
        return any(alike(each, program) for each in known)

    def _reader(self, loss: LossFunction) -> Programs:
        if loss not in self._readers:
            self._readers[loss] = Programs(
                replace(self._job, loss=loss), dtype=self._dtype, timings=self._timings, stored=self._stored
            )
        return self._readers[loss]

    def _take(
        self, program: Program, loss: LossFunction, training: bool, group: Group, own: Program | None = None
    ) -> Steps[Shapes]:
        """Divide a program that was read or made. own: the same in the job's own precision, where it is
        lifted to another."""
        shapes = self.shapes_of_program(program)
        tensors = shapes[: len(shapes) - len(program.others)]
        if (loss, training, shapes) in self._known:
            return shapes
        part, routed = (
            (yield from self.division.part(program, group, own)) if self.division else (program, {})
        )
        self._known[loss, training, shapes] = _Known(
            whole=program, part=part, priced=own or program, routed=routed
        )
        known = self._others.setdefault((loss, training, tensors), [])
        if program.others not in known:
            known.append(program.others)
        return shapes

    def _unlifted(self, program: Program, job: Job, batch: Any) -> Program | None:
        with default_precision(self._default):
            return unlifted(program, job, batch, self._own_dtypes)


def shapes_of(leaves: Leaves) -> Shapes:
    """Of the tensors of a batch.

    >>> shapes_of(leaves_of({"x": torch.ones(2, 3)}))
    (('x', (2, 3), torch.float32),)
    """
    return tuple((name, tuple(leaf.shape), leaf.dtype) for name, leaf in leaves.tensors.items())


def _pairs(batches: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Pairs of batches of the shapes of the first to read its program with, each instead of the one before
    where the loss cannot compute that.

    Another batch of the job if there is one. Else the first with its samples one place on; but integers have
    meanings (offsets into other tensors, lengths), so what that makes of them may be nothing that the loss
    can work with: then they stay as they are.
    """
    first, leaves = batches[0], leaves_of(batches[0])
    others = [each for each in map(leaves_of, batches[1:]) if shapes_of(each) == shapes_of(leaves)]
    real = [(first, leaves.rebuild(list(each.tensors.values()))) for each in others[:1]]
    all_moved, floats_moved = (
        leaves.rebuild(
            [
                leaf.roll(1, 0) if leaf.ndim and (leaf.is_floating_point() or every) else leaf
                for leaf in leaves.tensors.values()
            ]
        )
        for every in (True, False)
    )
    return [*real, (first, all_moved), (first, floats_moved)]
