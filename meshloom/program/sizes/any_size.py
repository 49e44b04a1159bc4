"""One program for all sizes of a batch's dims on which a loss does not depend, proved from three captures.

    a first size      captured, compared with eager
    a second size     captured by shapes: equal to the first program except for sizes
    a third size      the loss runs with symbolic sizes (`symbolic.py`), which yields guards and expressions of
                      sizes. A third program is captured by shapes, at sizes that differ in every dim that
                      may, and every integer of the three must be one of those expressions (`forms.py`)
    further sizes     computed from that form, where its guards hold

One rank proves and sends the result; all ranks compute their programs from it, and compare the first's hash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from meshloom.comm.group import Group
from meshloom.comm.objects import collect, share, share_bytes
from meshloom.comm.steps import Steps
from meshloom.core.errors import CaptureError
from meshloom.core.job import Job
from meshloom.program.ir.batch_values import fits
from meshloom.program.ir.leaves import Leaves, leaves_of
from meshloom.program.ir.program import Program
from meshloom.program.ir.transfer import pack, unpack
from meshloom.program.sizes.forms import Form, UnlikeError, alike, fitted
from meshloom.program.sizes.symbolic import Dim, NotTracedError, Sizes, Trace, dims_by_sizes, sizes_of, trace

MAX_TRIES = 4  # proofs of a loss, before programs are captured size by size
_STEPS = (3, 5, 7, 11, 13, 17, 2, 1, -1, -3, -5, -7, -11, -2)  # from known sizes to a new one

Read = Callable[[Any, Program], Program | None]


@dataclass(frozen=True, kw_only=True)
class AnySize:
    """Programs of all sizes that `form` covers. points: those it was fitted to. trace: of their loss."""

    form: Form[Program]
    points: tuple[Program, ...]
    trace: Trace

    def covers(self, leaves: Leaves) -> bool:
        """Whether there is a program for batches like this one."""
        return _like(self.points[0], leaves) and self.form.covers(sizes_of_batch(leaves))

    @property
    def dims(self) -> list[Dim]:
        """Dims whose sizes may differ."""
        points = [sizes_of_program(each) for each in self.points]
        return [dim for dim in points[0] if len({each[dim] for each in points}) > 1]

    def program(self, leaves: Leaves) -> Program | None:
        """The program for batches like this one, which it covers; None: an integer in it would not be one."""
        try:
            return self.form.at(sizes_of_batch(leaves))
        except UnlikeError:
            return None


class Proofs:
    """Proofs about the sizes of one loss in one mode. found: proofs, the same on all ranks. why: reason for
    the last failure, on the rank that tried."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tries = 0
        self.found: list[AnySize] = []
        self.why = ""

    def get(self, leaves: Leaves) -> AnySize | None:
        """The proof that covers batches like this one."""
        return next((each for each in self.found if each.covers(leaves)), None)

    def prove_together(
        self, group: Group, batch: Any, known: Sequence[Program], read: Read
    ) -> Steps[AnySize | None]:
        """A proof that covers batches like this one, which none does so far, if possible. Collective.

        known: captured programs, in order, the same on all ranks. read: on rank 0, captures a program by
            shapes for a batch, if it equals the given one except for sizes.
        """
        leaves = leaves_of(batch)
        family = [each for each in known if _like(each, leaves)]
        if len(family) < 2 or self._tries >= MAX_TRIES:
            return None
        proved = self._proved(leaves, family, read) if group.rank == 0 else None
        shared: list[Any] | None = yield from share(
            group, [asdict(proved[0].trace), proved[1]] if proved else None
        )
        if shared is None:
            self._tries += 1
            return None
        packed = yield from share_bytes(group, pack(proved[0].points[-1]) if proved else b"")
        if proved:
            mine = proved[0]
        else:
            trace_of_first = Trace(**{name: tuple(each) for name, each in shared[0].items()})
            mine = _any_size(trace_of_first, [*(family[number] for number in shared[1]), unpack(packed)])
        program = mine.program(leaves)
        hashes = yield from collect(group, program.digest() if program else "")
        if len(set(hashes)) > 1:
            raise CaptureError(
                "Ranks computed different programs from the same form. Use one version of meshloom and torch on all ranks."
            )
        self.found.append(mine)
        return mine

    def _proved(
        self, leaves: Leaves, family: Sequence[Program], read: Read
    ) -> tuple[AnySize, list[int]] | None:
        """The proof, and which programs of the family are its points, besides the last point."""
        try:
            found = trace(self._job, family[0], leaves)
        except NotTracedError as error:
            self.why = error.why
            return None
        kept: list[int] = []
        for number, program in enumerate(family):
            broken = found.broken(sizes_of_program(program))
            if broken is not None:
                self.why = f"it asks for sizes at {found.lines[broken].strip('()')}"
            elif not kept or alike(program, family[kept[0]]):
                kept.append(number)
        if len(kept) < 2:
            return None
        seen = [*(sizes_of_program(family[number]) for number in kept), sizes_of_batch(leaves)]
        sizes = further_sizes(found, seen)
        zeros: list[Tensor] = []
        for name, leaf in leaves.tensors.items():
            shape = [sizes[name, dim] for dim in range(leaf.ndim)]
            zeros.append(torch.zeros(shape, dtype=leaf.dtype, device=leaf.device))
        batch = leaves.rebuild(zeros)
        try:
            program = read(batch, family[kept[0]])
            if program is None:
                raise UnlikeError("other operators or constants")
            proved = _any_size(found, [*(family[number] for number in kept), program])
        except UnlikeError as error:
            self.why = f"it is another program at other sizes: {str(error)[:160]}"
            return None
        except Exception as error:  # of the job's code, at sizes that the job never had
            self.why = f"{type(error).__name__}: {str(error)[:160]}"
            return None
        return (proved, kept) if proved.covers(leaves) and proved.program(leaves) is not None else None


def sizes_of_batch(leaves: Leaves) -> dict[Dim, int]:
    """Sizes of the dims of a batch's tensors."""
    return sizes_of({name: tuple(leaf.shape) for name, leaf in leaves.tensors.items()})


def sizes_of_program(program: Program) -> dict[Dim, int]:
    """Sizes of the dims of a program's input tensors."""
    return sizes_of({each.name: each.meta.shape for each in program.tensor_inputs})


def further_sizes(found: Trace, seen: Sequence[Sizes]) -> dict[Dim, int]:
    """As many new sizes as possible at which the loss makes the same calls. seen: the last meet the guards.

    Dims that always had equal sizes get equal sizes.
    """
    chosen = dict(seen[-1])
    for known, dims in dims_by_sizes(seen).items():
        for step in _STEPS if min(known) > 1 else ():
            size = (min(known) if step < 0 else max(known)) + step
            trial = {**chosen, **dict.fromkeys(dims, size)}
            if size > 1 and size not in chosen.values() and found.broken(trial) is None:
                chosen = trial
                break
    return chosen


def _like(program: Program, leaves: Leaves) -> bool:
    """Whether a program is for batches like this one, except for sizes above 1."""
    mine = [(each.name, each.meta.dtype, _small(each.meta.shape)) for each in program.tensor_inputs]
    theirs = [(name, leaf.dtype, _small(leaf.shape)) for name, leaf in leaves.tensors.items()]
    return mine == theirs and fits(program.others, leaves.values)


def _small(shape: Sequence[int]) -> list[int]:
    """Sizes with 2 for anything above 1."""
    return [min(int(size), 2) for size in shape]


def _any_size(found: Trace, points: Sequence[Program]) -> AnySize:
    form = fitted([(sizes_of_program(each), each) for each in points], found)
    return AnySize(form=form, points=tuple(points), trace=found)
