"""Writes a checkpoint's files from all ranks of a host at once: each rank its own parts, to their places.

    rank 0      make the files, full length | its parts | checksums of its share of the bytes | flush
    rank r                                  | its parts | checksums of its share of the bytes |

Nobody gathers anything. Files get their full length before anything is written, so that a full disk is an
error there and not later. Checksums are of what is read back, whoever wrote it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from meshloom.checkpoint.checksums import Sum, of_files, sum_of_share
from meshloom.checkpoint.format import Piece
from meshloom.checkpoint.mapped_tensors import map_bytes
from meshloom.checkpoint.tensor_file import tensor_bytes
from meshloom.checkpoint.writing.file_layout import (
    FILE_BYTES,
    CheckpointLayout,
    FileLayout,
    HeldSpan,
    Kind,
    division_of,
    layout_of,
)
from meshloom.checkpoint.writing.problems import Problem, attempt, first_problem
from meshloom.checkpoint.writing.saving import Write, WrittenFiles, check_seen
from meshloom.comm import pieces as blocks
from meshloom.comm.group import Group
from meshloom.comm.objects import collect, share
from meshloom.comm.pieces import Interval, Pieces, Runs
from meshloom.core.errors import CheckpointError

Part = tuple[HeldSpan, Tensor]  # and its elements, flat
_WRITTEN_BYTES = 16 * 2**20  # by one call


@dataclass(frozen=True, kw_only=True)
class DividedState:
    """The files of a checkpoint, and what this rank writes of them."""

    layout: CheckpointLayout
    parts: tuple[Part, ...]


def parallel(weights: Sequence[Piece], pieces: Sequence[Piece], *, file_bytes: int = FILE_BYTES) -> Write:
    """Writes weights and state of all ranks, which are on one host.

    weights, pieces: what this rank holds of them, under the names of the model and of the state. What several
    ranks hold, each writes a part of. file_bytes: of a file, unless one tensor is larger.
    """

    def write(directory: Path, temporary: Path, group: Group) -> WrittenFiles:
        try:
            divided = divide(group, weights, pieces, file_bytes)
        except CheckpointError as error:  # the same one on all ranks
            problem: Problem = {"rank": group.rank, "reason": str(error), "needed": 0, "free": None}
            return WrittenFiles(problem=problem, files={}, pieces={})
        return write_divided(divided)(directory, temporary, group)

    return write


def divide(
    group: Group, weights: Sequence[Piece], pieces: Sequence[Piece], file_bytes: int = FILE_BYTES
) -> DividedState:
    """Agrees on the files, and on which rank writes what. Arguments: as for `parallel`. Raises the same
    `CheckpointError` on every rank if no rank holds some elements."""
    mine: list[tuple[Kind, Piece]] = [
        *(("weight", each) for each in weights),
        *(("state", each) for each in pieces),
    ]
    told = collect(group, [HeldSpan.of(kind, each).to_json() for kind, each in mine])
    everyone = [[HeldSpan.from_json(each) for each in spans] for spans in told]
    layout = layout_of((span for spans in everyone for span in spans), file_bytes)
    parts: list[Part] = []
    divided = division_of(everyone, group.rank)
    for (_, piece), span, (start, stop) in zip(mine, everyone[group.rank], divided, strict=True):
        if start < stop:
            part = HeldSpan(span.kind, span.key, start, stop, span.shape, span.dtype, span.held)
            parts.append((part, piece.tensor[start - span.start : stop - span.start]))
    return DividedState(layout=layout, parts=tuple(parts))


def write_divided(
    divided: DividedState, let_go: Callable[[Tensor], None] | None = None,
    told: Callable[[int, int], None] = lambda done, of: None,
) -> Write:  # fmt: skip
    """Writes what ranks have agreed on. let_go: called with a tensor of which some has been read. told: called with the bytes that this
    rank has written, and their number."""
    layout, parts = divided.layout, divided.parts
    sizes = {each.name: each.num_bytes for each in layout.files}

    def write(directory: Path, temporary: Path, group: Group) -> WrittenFiles:
        rank, needed = group.rank, sum(span.num_bytes for span, _ in parts)
        problem = _create_together(directory, temporary, group, layout)
        if problem is None:
            problem = attempt(
                rank, directory, needed, lambda: write_parts(temporary, layout, parts, let_go, told)
            )
            problem = first_problem(collect(group, {"problem": problem}))
        sums: list[Sum] = []
        if problem is None:
            problem = attempt(
                rank, directory, 0, lambda: sums.extend(sum_of_share(temporary, sizes, rank, group.size))
            )
            if rank == 0:
                problem = problem or attempt(rank, directory, needed, lambda: flush(temporary, layout.files))
        everyone = collect(group, sums)
        found = of_files([tuple(each) for theirs in everyone for each in theirs])
        facts = {name: {"bytes": size, "crc32": found.get(name)} for name, size in sizes.items()}
        return WrittenFiles(
            problem=problem,
            files=facts if rank == 0 and problem is None else {},
            pieces=layout.pieces(),
            weights=[each.name for each in layout.weights],
            index=layout.index(),
        )

    return write


def _create_together(
    directory: Path, temporary: Path, group: Group, layout: CheckpointLayout
) -> Problem | None:
    """Rank 0 makes the files, and all ranks see them; the problem of the first rank that has one."""
    problem: Problem | None = None
    if group.rank == 0:
        problem = attempt(0, directory, layout.tensor_bytes, lambda: create_files(temporary, layout.files))
    # which directory it is: another host may have one of that name
    node = share(group, temporary.stat().st_ino if group.rank == 0 and not problem else None)
    if problem is None:
        problem = attempt(group.rank, directory, 0, lambda: _check_same(temporary, node))
    return first_problem(collect(group, {"problem": problem}))


def create_files(temporary: Path, files: Sequence[FileLayout]) -> None:
    """Files with their headers, in full length."""
    for each in files:
        with (temporary / each.name).open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, each.num_bytes)
            file.write(each.header)


def write_parts(
    temporary: Path,
    layout: CheckpointLayout,
    parts: Sequence[Part],
    let_go: Callable[[Tensor], None] | None = None,
    told: Callable[[int, int], None] = lambda done, of: None,
) -> None:
    """Writes elements to their places in the files. let_go, told: as of `write_divided`."""
    check_seen(temporary)
    done, of = 0, sum(span.num_bytes for span, _ in parts)
    for span, tensor in parts:
        told(done, of)
        done += span.num_bytes
        read = partial(let_go, tensor) if let_go else None
        file, start = layout.place(span)
        flat = tensor.detach().to("cpu").contiguous()
        for at, block, first, held in _blocks(span):
            elements = flat[first : first + math.prod(block)]
            if at is not None:
                _write_at(
                    temporary / file.name, tensor_bytes(elements), start + at * span.dtype.itemsize, read
                )
            else:
                full = map_bytes(
                    temporary / file.name, start, math.prod(span.shape) * span.dtype.itemsize, shared=True
                )
                target = full.view(span.dtype).view(span.shape)
                blocks.put(Pieces(span.shape, (held,)), 0, elements.view(block), target)
        if read:
            read()


def flush(temporary: Path, files: Sequence[FileLayout]) -> None:
    """Brings what any rank has written to the disk."""
    for each in files:
        with (temporary / each.name).open("rb") as file:
            os.fsync(file.fileno())


def _check_same(temporary: Path, node: int | None) -> None:
    check_seen(temporary)
    if node is not None and temporary.stat().st_ino != node:
        raise CheckpointError(
            f"its {temporary} is not the one that rank 0 made; all ranks must save to one directory that they share"
        )


def _write_at(path: Path, data: memoryview, position: int, read: Callable[[], None] | None) -> None:
    """read: called when some of the data have been read."""
    size = _WRITTEN_BYTES if read else len(data)
    with path.open("r+b", buffering=0) as file:
        while len(data):
            count = os.pwrite(file.fileno(), data[:size], position)
            data, position = data[count:], position + count
            if read:
                read()


def _blocks(span: HeldSpan) -> Iterator[tuple[int | None, tuple[int, ...], int, tuple[Runs | None, ...]]]:
    """The blocks that make up a span: where it begins in the full tensor if it is consecutive there, else
    None; its shape; the number of its first element in the span; its runs of indices of each dim."""
    if span.held is None:
        yield span.start, (span.stop - span.start,), 0, ()
        return
    local = Pieces(span.shape, (span.held,)).local_shape(0)
    for bounds, first in intervals_as_boxes(local, span.start, span.stop):
        held = tuple(
            _some_of(runs if runs is not None else ((0, size),), *bound)
            for runs, size, bound in zip(span.held, span.shape, bounds, strict=True)
        )
        block = tuple(stop - start for start, stop in bounds)
        yield _consecutive(span.shape, held), block, first - span.start, held


def intervals_as_boxes(
    shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[Interval, ...], int]]:
    """Elements `start` to `stop` of a tensor in row-major order as blocks: the indices of each dim, and the
    number of the first element.

    >>> list(intervals_as_boxes((3, 4), 2, 9))
    [(((0, 1), (2, 4)), 2), (((1, 2), (0, 4)), 4), (((2, 3), (0, 1)), 8)]
    """
    if start >= stop:
        return
    if not shape:
        yield (), 0
        return
    row = math.prod(shape[1:])
    full = tuple((0, size) for size in shape[1:])
    above, below = -(-start // row), stop // row  # the rows from above to below are complete
    if above > below:  # within one row
        above = below
        for inner, first in intervals_as_boxes(shape[1:], start - below * row, stop - below * row):
            yield ((below, below + 1), *inner), first + below * row
        return
    for inner, first in intervals_as_boxes(shape[1:], start - (above - 1) * row, row) if start % row else ():
        yield ((above - 1, above), *inner), first + (above - 1) * row
    if above < below:
        yield ((above, below), *full), above * row
    for inner, first in intervals_as_boxes(shape[1:], 0, stop - below * row):
        yield ((below, below + 1), *inner), first + below * row


def _some_of(runs: Runs, start: int, stop: int) -> Runs:
    """The runs of the indices from number `start` to number `stop` of some runs."""
    found: list[Interval] = []
    for first, last in runs:
        begin, end = first + max(start, 0), min(first + stop, last)
        if begin < end:
            found.append((begin, end))
        start, stop = start - (last - first), stop - (last - first)
    return tuple(found)


def _consecutive(shape: Sequence[int], held: Sequence[Runs]) -> int | None:
    """The number of a block's first element in a tensor of `shape`, if its elements are consecutive there."""
    first = 0
    stride = math.prod(shape)
    strides: list[int] = []
    for size in shape:
        stride //= max(size, 1)
        strides.append(stride)
    single = True  # of the dims before, one index each
    for size, runs, each in zip(shape, held, strides, strict=True):
        if len(runs) != 1:
            return None
        start, stop = runs[0]
        if not single and (start, stop) != (0, size):
            return None
        single = single and stop - start == 1
        first += start * each
    return first
