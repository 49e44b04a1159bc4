"""Programs for batches of other sizes than those that a loss was captured for.

two sizes         captured as they come, the second by shapes alone
a third size      the loss runs with symbolic sizes (`symbolic.py`), which yields guards and expressions of sizes.
                  A third program is captured by shapes, at sizes that differ in every dim that may, and every
                  integer that differs among the three must be one of those expressions
further sizes     computed from these, where the guards hold
smaller sizes     of a large program, by the same rule: compared with eager in a second instead of minutes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from meshloom.core.errors import CODE_ERRORS, CaptureError
from meshloom.core.job import Job
from meshloom.program.capture.shapes import fake_of, model_by_shapes, moved_to, on_cpu
from meshloom.program.ir.batch_values import fits
from meshloom.program.ir.leaves import Leaves, leaves_of
from meshloom.program.ir.program import Program
from meshloom.program.sizes.alike import UnlikeError, alike, merged
from meshloom.program.sizes.symbolic import Dim, Expression, Sizes, Trace, holds, trace, value_of
from meshloom.program.trace.repeated_export import capturing

MIN_ELEMENTS = 2**24  # of all values of a program; fewer are compared in full in less time
SMALLEST = 32  # smallest size of a reduced dim
_STEPS = (3, 5, 7, 11, 13, 17, 2, 1, -1, -3, -5, -7, -11, -2)  # from known sizes to a new one


@dataclass(frozen=True, kw_only=True)
class AnySize:
    """Programs of all sizes that meet `conditions`. points: those at known sizes. follows: integers at these ->
    the expression that they are."""

    points: tuple[Program, ...]
    conditions: tuple[Expression, ...]
    follows: Mapping[tuple[int, ...], Expression]

    def program(self, leaves: Leaves) -> Program | None:
        """The program for batches like this one, if they meet the conditions."""
        sizes = sizes_of_batch(leaves)
        if not is_like(self.points[0], leaves) or not all(holds(each, sizes) for each in self.conditions):
            return None
        known: dict[tuple[int, ...], int] = {}

        def number(numbers: tuple[int, ...]) -> int:
            if numbers not in known:
                is_fixed = len(set(numbers)) == 1
                known[numbers] = numbers[0] if is_fixed else int(value_of(self.follows[numbers], sizes))
            return known[numbers]

        return merged(self.points, number)


def fitted(found: Trace, points: Sequence[Program]) -> AnySize:
    """Programs of any size, from some at known sizes and the trace of their loss. Raises `UnlikeError`.

    What is equal at all points stays equal, and so do expressions that cannot be told apart there.
    """
    at = [sizes_of_program(each) for each in points]
    dims: list[Expression] = [["size", *dim] for dim in at[0]]
    groups: dict[tuple[Any, ...], list[Expression]] = {}
    for each in {repr(each): each for each in (*dims, *found.expressions)}.values():
        try:
            groups.setdefault(tuple(value_of(each, sizes) for sizes in at), []).append(each)
        except ZeroDivisionError:
            continue
    conditions = list(found.guards)
    for values, group in groups.items():
        wanted = values[0] if len(set(values)) == 1 else group[0]
        conditions += [["Equality", each, wanted] for each in group]  # none divides by zero then

    def check(numbers: tuple[int, ...]) -> int:
        if len(set(numbers)) > 1 and numbers not in groups:
            raise UnlikeError(f"{list(numbers)} match no expression of sizes")
        return numbers[0]

    merged(points, check)
    same = tuple(replace(each, constants=points[0].constants) for each in points)
    follows = {values: group[0] for values, group in groups.items()}
    return AnySize(points=same, conditions=tuple(conditions), follows=follows)


def is_like(program: Program, leaves: Leaves) -> bool:
    """Whether a program is for batches like this one, except for sizes above 1."""

    def small(shape: Sequence[int]) -> list[int]:
        return [min(int(size), 2) for size in shape]

    mine = [(each.name, each.meta.dtype, small(each.meta.shape)) for each in program.tensor_inputs]
    theirs = [(name, leaf.dtype, small(leaf.shape)) for name, leaf in leaves.tensors.items()]
    return mine == theirs and fits(program.others, leaves.values)


def sizes_of(shapes: Mapping[str, Sequence[int]]) -> dict[Dim, int]:
    """Sizes of all dims of a batch's tensors."""
    return {(name, dim): int(size) for name, shape in shapes.items() for dim, size in enumerate(shape)}


def sizes_of_batch(leaves: Leaves) -> dict[Dim, int]:
    """Sizes of the dims of a batch's tensors."""
    return sizes_of({name: leaf.shape for name, leaf in leaves.tensors.items()})


def sizes_of_program(program: Program) -> dict[Dim, int]:
    """Sizes of the dims of a program's input tensors."""
    return sizes_of({each.name: each.meta.shape for each in program.tensor_inputs})


def further_batch(found: Trace, programs: Sequence[Program], leaves: Leaves) -> Any:
    """A batch of zeros with as many new sizes as possible at which the loss makes the same calls.

    programs: at known sizes. leaves: of a batch at whose sizes it makes these calls. Dims that always had equal sizes
    get equal sizes.
    """
    seen = [*map(sizes_of_program, programs), sizes_of_batch(leaves)]
    together: dict[tuple[int, ...], list[Dim]] = {}
    for dim in seen[-1]:
        together.setdefault(tuple(each[dim] for each in seen), []).append(dim)
    sizes = dict(seen[-1])
    for known, dims in together.items():
        for step in _STEPS if min(known) > 1 else ():
            size = (min(known) if step < 0 else max(known)) + step
            trial = {**sizes, **dict.fromkeys(dims, size)}
            if size > 1 and size not in sizes.values() and found.broken(trial) is None:
                sizes = trial
                break
    return leaves.rebuild(
        [
            torch.zeros([sizes[name, dim] for dim in range(leaf.ndim)], dtype=leaf.dtype, device=leaf.device)
            for name, leaf in leaves.tensors.items()
        ]
    )


def captured_by_shapes(
    known: Program, job: Job, batch: Any, capture: Callable[[nn.Module, Any], Program]
) -> Program | None:
    """The program for batches like this one, captured from shapes alone, with `known`'s constants; None if it
    differs in more than sizes, or if the capture needs values.

    known: a compared program of the same loss and mode. capture: captures a model and a batch.
    """
    try:
        with capturing(known.precision), on_cpu(known.device):
            model, mode = model_by_shapes(job, known.precision, training=known.training)
            leaves = leaves_of(batch)
            fake = leaves.rebuild([fake_of(each, mode) for each in leaves.tensors.values()])
            found = moved_to(capture(model, fake), known.device)
    except CaptureError:
        return None
    # for example, a constructor draws nothing
    values_are_known = not any(isinstance(each, FakeTensor) for each in found.constants.values())
    return (
        replace(found, constants=dict(known.constants)) if values_are_known and alike(found, known) else None
    )


@dataclass(frozen=True, kw_only=True)
class Smaller:
    """program: for batches of `sizes`."""

    program: Program
    sizes: Sizes

    def batch(self, batch: Any) -> Any:
        """The batch reduced to these sizes."""
        return shrunk(leaves_of(batch), self.sizes)


def smaller(program: Program, job: Job, batch: Any, read: Callable[[Any], Program]) -> Smaller | None:
    """The program at smaller sizes, if it is large and is proved to be the same there. batch: one that it is for.

    read: captures the program for a batch.
    """
    if not is_large(program):
        return None
    leaves = leaves_of(batch)
    try:
        found = trace(job, program, leaves)
        sizes = _smallest(sizes_of_batch(leaves), found)
        if sizes is None:
            return None
        there = read(shrunk(leaves, sizes))
        fitted(found, (program, there))
    except CODE_ERRORS:
        return None
    return Smaller(program=there, sizes=sizes)


def is_large(program: Program) -> bool:
    """Whether comparing it in full takes long."""
    return sum(math.prod(each.shape) for node in program.nodes for each in node.outputs) > MIN_ELEMENTS


def shrunk(leaves: Leaves, sizes: Sizes) -> Any:
    """A batch with evenly spaced indices of every dim, the same in dims of equal size."""

    def part(name: str, leaf: Tensor) -> Tensor:
        for dim, size in enumerate(leaf.shape):
            if sizes[name, dim] < size:
                spaced = torch.linspace(0, size - 1, sizes[name, dim], device=leaf.device)
                leaf = leaf.index_select(dim, spaced.long())
        return leaf

    return leaves.rebuild([part(name, leaf) for name, leaf in leaves.tensors.items()])


def _smallest(whole: Sizes, found: Trace) -> dict[Dim, int] | None:
    """Sizes as small as the guards allow, equal ones alike, the largest first; None: no smaller ones."""
    sizes = dict(whole)
    for size in sorted({each for each in whole.values() if each >= 4 * SMALLEST}, reverse=True):
        dims = [dim for dim, each in whole.items() if each == size]
        shifts = range(size.bit_length())
        tried = {each for n in shifts for each in (size >> n, SMALLEST << n, 3 * SMALLEST // 2 << n)}
        for less in sorted(each for each in tried if SMALLEST <= each <= size // 2):
            if found.broken(trial := {**sizes, **dict.fromkeys(dims, less)}) is None:
                sizes = trial
                break
    return sizes if sizes != whole else None
