"""Rows of a batch that go on with their own state in chunks of other sizes.

saved     chunk 0: rows 0-3            chunk 1: rows 4-7
resumed   chunk 0: rows 0-2            chunk 1: rows 3-5              chunk 2: rows 6-7
          0 of 0-3                     3 of 0-3, 0-1 of 4-7           2-3 of 4-7
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

Record = Mapping[str, Any]  # of what a chunk has left; "rows", "step", "value"


@dataclass(frozen=True, kw_only=True)
class SavedRows:
    """Rows `start` to `stop` of a saved chunk."""

    chunk: int
    start: int
    stop: int


def rows_anew(saved: Sequence[int], sizes: Sequence[int]) -> list[list[SavedRows]]:
    """The saved rows of each chunk. saved, sizes: of the chunks then and now, of as many rows in all.

    >>> [[(each.chunk, each.start, each.stop) for each in rows] for rows in rows_anew([4, 4], [3, 3, 2])]
    [[(0, 0, 3)], [(0, 3, 4), (1, 0, 2)], [(1, 2, 4)]]
    """
    starts, found = [0, *accumulate(saved)], list[list[SavedRows]]()
    for begin, end in zip([0, *accumulate(sizes)], accumulate(sizes), strict=False):
        found.append(
            [
                SavedRows(chunk=chunk, start=max(begin - first, 0), stop=min(end - first, size))
                for chunk, (first, size) in enumerate(zip(starts, saved, strict=False))
                if max(begin, first) < min(end, first + size)
            ]
        )
    return found


def batch_dims(records: Mapping[str, Record], rows: Sequence[int], step: int) -> list[int] | None:
    """The dim of each tensor in the values of an attribute along which the chunks of `step` divide a batch; None: that is in
    doubt. records: by number of the chunk. rows: of each chunk."""
    filled = [(number, size) for number, size in enumerate(rows) if size]
    found = [(records.get(str(number)), size) for number, size in filled]
    shapes: list[list[list[int]]] = []
    outlines: list[Any] = []
    for record, size in found:
        if record is None or (record["step"], record["rows"]) != (step, size):
            return None
        shapes.append([])
        outlines.append(_outline(record["value"], shapes[-1]))
    if any(outline != outlines[0] for outline in outlines):
        return None
    dims = [
        _batch_dim(list(of_chunks), [size for _, size in filled]) for of_chunks in zip(*shapes, strict=True)
    ]
    return None if None in dims else [dim for dim in dims if dim is not None]


def _batch_dim(shapes: Sequence[Sequence[int]], sizes: Sequence[int]) -> int | None:
    """The only dim of all chunks' tensors that is as large as the chunk.

    >>> _batch_dim([[1, 4, 9], [1, 3, 9]], [4, 3]), _batch_dim([[4, 4]], [4]), _batch_dim([[1, 8, 9]], [4])
    (1, None, None)
    """
    alike = [[dim for dim, size in enumerate(shape) if size == rows] for shape, rows in zip(shapes, sizes, strict=True)]  # fmt: skip
    if any(len(dims) != 1 or dims != alike[0] for dims in alike):
        return None
    dim = alike[0][0]
    others = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    return dim if len(others) == 1 else None


def _outline(tree: Any, shapes: list[list[int]]) -> Any:
    """A value without the shapes of its tensors, which go to `shapes`."""
    if not isinstance(tree, Mapping):
        return tree
    if "shape" in tree:
        shapes.append(list(tree["shape"]))
        return {name: each for name, each in tree.items() if name != "shape"}
    return {kind: [_outline(each, shapes) for each in items] for kind, items in tree.items()}
