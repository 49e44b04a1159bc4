"""A program at smaller sizes of its batch, which takes a fraction of the time to compare with eager, and is
proved to be the same except for sizes.

    program      batch [2, 1024]     minutes of forwards and backwards on a CPU
    smaller      batch [2, 32]       a second; integers that differ are sizes that the loss itself computes

The loss runs once with symbolic sizes (`symbolic.py`), which yields the sizes at which it makes the same
calls, and the sizes of its operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshloom.core.job import Job
from meshloom.program.ir.leaves import Leaves, leaves_of
from meshloom.program.ir.program import Program
from meshloom.program.sizes.any_size import sizes_of_batch
from meshloom.program.sizes.forms import same_but_for
from meshloom.program.sizes.symbolic import Dim, NotTracedError, Sizes, trace, value_of

# elements of all values of a program, below which comparing it in full takes no longer than this
MIN_ELEMENTS = 2**24
SMALLEST = 32  # smallest size of a reduced dim
_FACTORS = (1, 1.5)  # times powers of two: sizes to try


@dataclass(frozen=True, kw_only=True)
class Smaller:
    """program: for batches of `sizes`."""

    program: Program
    sizes: Mapping[Dim, int]

    def batch(self, batch: Any) -> Any:
        """The batch reduced to these sizes."""
        return shrunk(leaves_of(batch), self.sizes)


def smaller(program: Program, job: Job, batch: Any, read: Callable[[Any], Program]) -> Smaller | None:
    """The program at smaller sizes, if it is large and the proof succeeds. batch: one that it applies to.

    read: captures the program for a batch, with values. Its errors are ignored: the job never had such sizes.
    """
    if not is_large(program):
        return None
    leaves = leaves_of(batch)
    whole = sizes_of_batch(leaves)
    try:
        found = trace(job, program, leaves)
    except NotTracedError:
        return None
    sizes = _smallest(whole, lambda each: found.broken(each) is None)
    if sizes == whole:
        return None
    try:
        program_there = read(shrunk(leaves, sizes))
    except Exception:  # of the job's code
        return None
    seen: list[Any] = [*found.expressions, *(["size", *dim] for dim in whole)]
    pairs = {_values(each, (whole, sizes)) for each in seen}
    if not same_but_for(program, program_there, pairs):
        return None
    return Smaller(program=program_there, sizes=sizes)


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


def _smallest(whole: Sizes, allowed: Callable[[Sizes], bool]) -> dict[Dim, int]:
    """Sizes as small as allowed, the largest first. Dims of equal sizes get equal sizes."""
    found = dict(whole)
    for size in sorted({each for each in whole.values() if each >= 4 * SMALLEST}, reverse=True):
        dims = [dim for dim, each in whole.items() if each == size]
        powers = range(size.bit_length())
        tried = {int(SMALLEST * factor * 2**power) for factor in _FACTORS for power in powers}
        tried |= {size >> power for power in range(1, size.bit_length())}  # its divisors among them
        for less in sorted(each for each in tried if SMALLEST <= each <= size // 2):
            if allowed(trial := {**found, **dict.fromkeys(dims, less)}):
                found = trial
                break
    return found


def _values(expression: Any, points: Sequence[Sizes]) -> tuple[Any, ...]:
    try:
        return tuple(value_of(expression, each) for each in points)
    except ZeroDivisionError:
        return ()
