"""What ranks hold of a value, counted in sections that no cut splits: a million indices have as many of them
as ten.

    4 x 8, of which rank 0 has the first 3 of each 8        runs [0, 3), [8, 11), [16, 19), [24, 27)
    in sections of the 4 and of the 8: [4] x [3, 5]         run  [0, 1), of 4 x 3 indices

Shards intersect in sections exactly as in indices, so the cost of resharding is found without listing
indices.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from meshloom.comm.pieces import Pieces, Runs
from meshloom.tensor_parallel.layout.axes import Axis, Key
from meshloom.tensor_parallel.layout.cuts import StripNumbers, rows_expected, runs_in, stretch_of
from meshloom.tensor_parallel.layout.layout import Axes
from meshloom.tensor_parallel.layout.placement import Cut


class Sections:
    """The sections of one program's axes. cuts: number of an axis -> all of its cuts."""

    def __init__(self, numbers: StripNumbers, cuts: Mapping[int, Sequence[Cut]], num_ranks: int) -> None:
        self._numbers = numbers
        self._cuts = cuts
        self._num_ranks = num_ranks
        self._bounds: dict[Key, tuple[int, ...]] = {}
        self._sizes: dict[Key, tuple[int, ...]] = {}
        self._pieces: dict[tuple[tuple[Key, ...], Cut | None], Pieces] = {}
        self._equal: dict[Pieces, Pieces] = {}

    def pieces(self, axes: Axes, cut: Cut | None) -> Pieces:
        """What each rank holds of a value with these axes, in sections; one object for all that are equal."""
        key = tuple(axis.key for axis in axes), cut
        if key not in self._pieces:
            dims = [self._dim(axis, cut) for axis in axes]
            sizes = tuple(sizes for sizes, _ in dims)
            rows = tuple(
                tuple(held[rank] if held is not None else None for _, held in dims)
                for rank in range(self._num_ranks)
            )
            pieces = Pieces(tuple(map(len, sizes)), rows, tuple((0, *accumulate(each)) for each in sizes))
            self._pieces[key] = self._equal.setdefault(pieces, pieces)
        return self._pieces[key]

    def _dim(self, axis: Axis, cut: Cut | None) -> tuple[Sequence[int], list[Runs] | None]:
        """The sizes of an axis's sections, and the runs of them that each rank holds; None: all, on every
        rank."""
        if cut is None or not (self._numbers.leaves(axis) & cut.parts.keys()):
            return self._sizes_of(axis), None
        routed = self._numbers.route(axis, cut)
        if routed is not None:
            # the positions of routed rows are unknown, so such a shard intersects no other
            rows = [rows_expected(axis, *routed, cut, rank) for rank in range(self._num_ranks)]
            places = sorted({0, axis.size, *(place for runs in rows for run in runs for place in run)})
            sizes = [stop - start for start, stop in pairwise(places)]
            return sizes, [_in_sections(runs, places) for runs in rows]
        return self._sizes_of(axis), [self._runs(axis, cut, rank) for rank in range(self._num_ranks)]

    def _sizes_of(self, axis: Axis) -> tuple[int, ...]:
        """Sizes of an axis's sections, in order."""
        found = self._sizes.get(axis.key)
        if found is None:
            if axis.kind is None:
                found = tuple(stop - start for start, stop in pairwise(self._bounds_of(axis)))
            elif axis.kind == "concatenation":
                found = tuple(size for part in axis.parts for size in self._sizes_of(part))
            else:
                found = (1,)
                for part in axis.parts:
                    found = tuple(outer * inner for outer in found for inner in self._sizes_of(part))
            self._sizes[axis.key] = found
        return found

    def _bounds_of(self, leaf: Axis) -> tuple[int, ...]:
        """The boundaries of the sections of an axis without parts: those of all cuts."""
        found = self._bounds.get(leaf.key)
        if found is None:
            strip, first, size = leaf.key
            cuts = self._cuts.get(self._numbers.of[strip], ()) if strip in self._numbers.of else ()
            places = {
                place - first for cut in cuts for run in cut.parts[self._numbers.of[strip]] for place in run
            }
            found = self._bounds[leaf.key] = (0, *sorted(place for place in places if 0 < place < size), size)
        return found

    def _runs(self, axis: Axis, cut: Cut, rank: int) -> Runs:
        """The runs of sections that a rank holds."""

        def of_leaf(leaf: Axis) -> Runs:
            return _in_sections(stretch_of(leaf, cut, self._numbers, rank), self._bounds_of(leaf))

        return runs_in(axis, of_leaf, lambda part: len(self._sizes_of(part)))


def _in_sections(runs: Runs, bounds: Sequence[int]) -> Runs:
    """Runs of indices as runs of the sections between `bounds`."""
    return tuple((bisect_left(bounds, start), bisect_left(bounds, stop)) for start, stop in runs)
