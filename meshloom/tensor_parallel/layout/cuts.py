"""Candidate cuts of a program: how its ranks could shard axes, and what each rank then holds of a value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from meshloom.comm.pieces import Interval, Pieces, Runs
from meshloom.tensor_parallel.layout.axes import Axis, Key, Strip
from meshloom.tensor_parallel.layout.layout import Axes, Layout, axes_in
from meshloom.tensor_parallel.layout.placement import Cut, Part, Placement, even_parts, shared_parts
from meshloom.tensor_parallel.layout.routes import Route, key_of


@dataclass(frozen=True, kw_only=True)
class StripNumbers:
    """A number for every strip that can be sharded, in program order; `axes[number]` is the strip.

    routes: key of an axis -> number of a strip -> the route by which the axis is sharded together with that
        strip.
    """

    of: Mapping[Strip, int]
    axes: tuple[Strip, ...]
    routes: Mapping[tuple[Key, ...], Mapping[int, Route]] = field(
        default_factory=dict[tuple[Key, ...], Mapping[int, Route]]
    )
    # cache of `leaves`
    _leaves: dict[Axis, frozenset[int]] = field(
        default_factory=dict[Axis, frozenset[int]], repr=False, compare=False
    )

    def leaves(self, axis: Axis) -> frozenset[int]:
        """Numbers of the strips that an axis consists of or is routed with."""
        found = self._leaves.get(axis)
        if found is None:
            found = frozenset(self.of[leaf.strip] for leaf in axis.leaves() if leaf.strip in self.of)
            found = found | self.routes.get(key_of(axis), {}).keys() if self.routes else found
            self._leaves[axis] = found
        return found

    def route(self, axis: Axis, cut: Cut | None) -> tuple[int, Route] | None:
        """The number of the sharded strip that determines an axis's rows, and the route between them."""
        if cut is None or not self.routes:
            return None
        found = self.routes.get(key_of(axis), {})
        return next(((number, route) for number, route in found.items() if number in cut.parts), None)


def numbers_of(layout: Layout) -> StripNumbers:
    """Numbers for the strips of all values, and of labels that occur in no value. Those of size 1 are on every rank, but for a single row that a
    slice of a parameter leaves out or keeps."""
    strips = dict.fromkeys(leaf.strip for axis in axes_in(layout) for leaf in axis.leaves())
    kept = {**layout.program.parameters, **layout.program.buffers}
    slices = (
        axis
        for each in kept.values()
        for axis in layout.values[each.value][0]
        if axis.kind == "concatenation"
    )
    # so that a parameter's shards are the same, however many of its rows are read
    rows = dict.fromkeys(leaf.strip for axis in slices for leaf in axis.leaves() if leaf.strip.size == 1)
    of = {
        strip: number for number, strip in enumerate([*(strip for strip in strips if strip.size > 1), *rows])
    }
    routes: dict[tuple[Key, ...], dict[int, Route]] = {}
    several: set[tuple[tuple[Key, ...], int]] = set()  # rows routed by two values: the same experts twice
    for route in layout.routes:
        if route.groups.kind is None and route.groups.is_whole and route.groups.strip in of:
            key, number = key_of(route.rows), of[route.groups.strip]
            if routes.setdefault(key, {}).setdefault(number, route) is not route or any(
                strip is route.groups.strip for strip, _, _ in key
            ):
                several.add((key, number))
    kept = {
        key: {number: route for number, route in found.items() if (key, number) not in several}
        for key, found in routes.items()
    }
    return StripNumbers(of=of, axes=tuple(of), routes={key: found for key, found in kept.items() if found})


def candidates(layout: Layout, numbers: StripNumbers, num_ranks: int) -> list[Cut]:
    """All cuts that may pay off: of an axis with at least `num_ranks` indices; of a concatenation; of the
    product of a smaller axis with another."""
    found: dict[frozenset[tuple[int, tuple[Interval, ...]]], Cut] = {}

    def add(parts: Mapping[int, tuple[Interval, ...]], *, is_product: bool = False) -> None:
        cut = Cut(name=f"axis {'.'.join(map(str, parts))}", parts=dict(parts), is_product=is_product)
        found.setdefault(frozenset(parts.items()), cut)

    for axis in _all_axes(layout):
        if axis.kind == "concatenation" and all(
            part.kind is None and part.is_whole and not part.strip.is_shifted for part in axis.parts
        ):
            strips = [part.strip for part in axis.parts]
            if len(set(strips)) == len(strips) and axis.size >= num_ranks:
                ranges = _along(even_parts(axis.size, num_ranks), [strip.size for strip in strips])
                shards = zip(strips, ranges, strict=True)
                add({numbers.of[strip]: shard for strip, shard in shards if strip in numbers.of})
        if axis.kind == "product":
            for outer, inner in pairwise(axis.parts):
                plain = all(part.kind is None and part.is_whole for part in (outer, inner))
                if (
                    plain
                    and outer.strip is not inner.strip
                    and 1 < outer.size < num_ranks <= outer.size * inner.size
                ):
                    outers, inners = shared_parts(outer.size, inner.size, num_ranks)
                    add({numbers.of[outer.strip]: outers, numbers.of[inner.strip]: inners}, is_product=True)
        for strip in dict.fromkeys(leaf.strip for leaf in axis.leaves()):
            axis_intervals = sorted(strip.axis_intervals) if strip.is_shifted else ()
            for start, stop in [(0, strip.size), *axis_intervals]:
                if stop - start >= num_ranks and strip in numbers.of:
                    add({numbers.of[strip]: _around(start, stop, strip.size, num_ranks)})
    return list(found.values())


def cuts_by_axis(layout: Layout, numbers: StripNumbers, num_ranks: int) -> dict[int, list[Cut]]:
    """Axis number -> the candidate cuts that it is in."""
    cuts: dict[int, list[Cut]] = {}
    for cut in candidates(layout, numbers, num_ranks):
        for number in cut.parts:
            cuts.setdefault(number, []).append(cut)
    return cuts


def _around(start: int, stop: int, size: int, num_ranks: int) -> tuple[Interval, ...]:
    """Even shards of an interval; the first and last rank also hold what lies around it.

    >>> _around(2, 8, 9, 3)
    ((0, 4), (4, 6), (6, 9))
    """
    bounds = [start + stop for _, stop in even_parts(stop - start, num_ranks)]
    return tuple(pairwise([0, *bounds[:-1], size]))


def pieces_of(axes: Axes, cut: Cut | None, numbers: StripNumbers, num_ranks: int) -> Pieces:
    """What each rank holds of a value with these axes."""
    rows = tuple(tuple(runs_of(axis, cut, numbers, rank) for axis in axes) for rank in range(num_ranks))
    return Pieces(tuple(axis.size for axis in axes), rows)


def route_of(axes: Axes, placement: Placement, numbers: StripNumbers) -> tuple[int, int, Route] | None:
    """The dim of a value whose rows are routed by a sharded axis, that axis's number, and the route. None:
    its shards are static."""
    if not numbers.routes or not isinstance(placement, Part):
        return None
    found = ((dim, numbers.route(axis, placement.cut)) for dim, axis in enumerate(axes))
    return next(((dim, *route) for dim, route in found if route is not None), None)


def covers(axes: Iterable[Axis], cut: Cut, numbers: StripNumbers) -> bool:
    """Whether the ranks' shards of a value with these axes cover it, and those of ranks that share indices
    overlap in blocks.

    A shard of one axis times a shard of another does not cover a value unless the cut is of their product;
    nor does a shard of an axis times the same shard of it.
    """
    cut_axes = [axis for axis in axes if numbers.leaves(axis) & cut.parts.keys()]
    if len(cut_axes) > 1:
        touched = [numbers.leaves(axis) & cut.parts.keys() for axis in cut_axes]
        if (
            not cut.is_product
            or sum(map(len, touched)) > len(frozenset().union(*touched))
            or any(map(_has_concatenation, cut_axes))
        ):
            return False
    for axis in cut_axes:
        if axis.kind == "product" and not covers(axis.parts, cut, numbers):
            return False
        if axis.kind == "concatenation" and not all(covers((part,), cut, numbers) for part in axis.parts):
            return False
    return True


def _has_concatenation(axis: Axis) -> bool:
    """Whether it contains a concatenation."""
    return axis.kind == "concatenation" or any(map(_has_concatenation, axis.parts))


def runs_of(axis: Axis, cut: Cut | None, numbers: StripNumbers, rank: int) -> Runs | None:
    """The index ranges of an axis that a rank holds; None: all indices, on every rank."""
    if cut is None or not (numbers.leaves(axis) & cut.parts.keys()):
        return None
    routed = numbers.route(axis, cut)
    if routed is not None:
        return rows_expected(axis, *routed, cut, rank)
    return runs_in(axis, lambda leaf: stretch_of(leaf, cut, numbers, rank), lambda part: part.size)


def rows_expected(axis: Axis, number: int, route: Route, cut: Cut, rank: int) -> Runs:
    """The rows of a routed axis that a rank holds if all groups get equally many; `number` is the axis of
    groups."""
    first, last = (each * axis.size // route.groups.size for each in cut.parts[number][rank])
    return ((first, last),) if first < last else ()


def num_runs(axis: Axis, cut: Cut, numbers: StripNumbers, rank: int) -> int:
    """The number of index ranges in `runs_of`, without listing them."""
    routed = numbers.route(axis, cut)
    if routed is not None:
        return len(rows_expected(axis, *routed, cut, rank))
    return _edges(axis, cut, numbers, rank)[0]


def _edges(axis: Axis, cut: Cut, numbers: StripNumbers, rank: int) -> tuple[int, int, bool, bool]:
    """The number of ranges and indices that a rank holds; whether the first begins at the axis's start, and
    the last ends at its end."""
    if axis.kind is None:
        for start, stop in stretch_of(axis, cut, numbers, rank):  # one at most
            return 1, stop - start, start == 0, stop == axis.size
        return 0, 0, False, False
    first, *others = axis.parts
    count, size, begins, ends = _edges(first, cut, numbers, rank)
    for part in others:
        inner = _edges(part, cut, numbers, rank)
        if axis.kind == "concatenation":
            count, size, ends = count + inner[0] - (ends and inner[2]), size + inner[1], inner[3]
        elif inner[1] == part.size:
            size *= part.size
        else:  # a range in each outer index; those of adjacent indices may touch
            count = size * inner[0] - (size - count) * (inner[2] and inner[3])
            size, begins, ends = size * inner[1], begins and inner[2], ends and inner[3]
    return count, size, begins, ends


def stretch_of(leaf: Axis, cut: Cut, numbers: StripNumbers, rank: int) -> Runs:
    """What a rank holds of an axis without parts: one range, or none."""
    strip, first, size = leaf.key
    number = numbers.of.get(strip)
    start, stop = cut.parts[number][rank] if number is not None and number in cut.parts else (0, strip.size)
    start, stop = max(start - first, 0), min(stop - first, size)
    return ((start, stop),) if start < stop else ()


def runs_in(axis: Axis, of_leaf: Callable[[Axis], Runs], size_of: Callable[[Axis], int]) -> Runs:
    """The ranges of an axis, composed of those of the axes without parts in it. size_of: of an axis, in the
    unit of the ranges."""
    if axis.kind is None:
        return of_leaf(axis)
    if axis.kind == "concatenation":
        found: list[Interval] = []
        offset = 0
        for part in axis.parts:
            found += [(offset + start, offset + stop) for start, stop in runs_in(part, of_leaf, size_of)]
            offset += size_of(part)
        return _merged(found)
    runs: Runs = ((0, 1),)
    for part in axis.parts:
        inner, size = runs_in(part, of_leaf, size_of), size_of(part)
        if inner == ((0, size),):
            runs = tuple((start * size, stop * size) for start, stop in runs)
        else:
            runs = tuple(
                (index * size + start, index * size + stop)
                for first, last in runs
                for index in range(first, last)
                for start, stop in inner
            )
    return _merged(runs)


def _merged(runs: Sequence[Interval]) -> Runs:
    """Ranges with adjacent ones merged."""
    merged: list[Interval] = []
    for start, stop in runs:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def _along(ranges: Sequence[Interval], sizes: Sequence[int]) -> list[tuple[Interval, ...]]:
    """Ranges over several consecutive parts, as ranges within each part.

    >>> _along([(0, 4), (4, 7)], [6, 1])
    [((0, 4), (4, 6)), ((0, 0), (0, 1))]
    """
    found: list[tuple[Interval, ...]] = []
    offset = 0
    for size in sizes:
        within = ((max(start - offset, 0), min(stop - offset, size)) for start, stop in ranges)
        found.append(tuple((start, stop) if start < stop else (0, 0) for start, stop in within))
        offset += size
    return found


def _all_axes(layout: Layout) -> Iterator[Axis]:
    seen: set[Key] = set()
    for first in axes_in(layout):
        stack = [first]
        while stack:
            axis = stack.pop()
            if axis.key not in seen:
                seen.add(axis.key)
                yield axis
                stack += axis.parts if axis.kind else ()
