"""Candidate cuts of a program: which axes its ranks could divide among them, and what they then hold of each
value."""

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
    """A number for every strip that axes are stretches of, in the order of the program; `axes[number]` is the
    strip.

    routes: what an axis is made of -> number of a strip -> the route by which the first goes where the second
        goes.
    """

    of: Mapping[Strip, int]
    axes: tuple[Strip, ...]
    routes: Mapping[tuple[Key, ...], Mapping[int, Route]] = field(
        default_factory=dict[tuple[Key, ...], Mapping[int, Route]]
    )
    # that were asked for
    _leaves: dict[Axis, frozenset[int]] = field(
        default_factory=dict[Axis, frozenset[int]], repr=False, compare=False
    )

    def leaves(self, axis: Axis) -> frozenset[int]:
        """Numbers of what an axis is made of, and of what it goes with; strips of size 1 are none to cut."""
        found = self._leaves.get(axis)
        if found is None:
            found = frozenset(self.of[leaf.strip] for leaf in axis.leaves() if leaf.strip in self.of)
            found = found | self.routes.get(key_of(axis), {}).keys() if self.routes else found
            self._leaves[axis] = found
        return found

    def route(self, axis: Axis, cut: Cut | None) -> tuple[int, Route] | None:
        """The axis that is cut, by its number, and the route by which this one goes with it."""
        found = self.routes.get(key_of(axis), {}) if self.routes and cut is not None else {}
        return next(
            ((number, route) for number, route in found.items() if cut is not None and number in cut.parts),
            None,
        )


def numbers_of(layout: Layout) -> StripNumbers:
    """Number the strips of all values, and of labels that no value has by itself."""
    strips = dict.fromkeys(leaf.strip for axis in axes_in(layout) for leaf in axis.leaves())
    of = {strip: number for number, strip in enumerate(strip for strip in strips if strip.size > 1)}
    routes: dict[tuple[Key, ...], dict[int, Route]] = {}
    several: set[tuple[tuple[Key, ...], int]] = set()  # rows that go two ways: the same experts twice
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
    """Every cut that could be worth taking: of an axis of at least `num_ranks` indices; of several in a row;
    of a small one times another."""
    found: dict[frozenset[tuple[int, tuple[Interval, ...]]], Cut] = {}

    def add(parts: Mapping[int, tuple[Interval, ...]], *, times: bool = False) -> None:
        found.setdefault(
            frozenset(parts.items()),
            Cut(name=f"axis {'.'.join(map(str, parts))}", parts=dict(parts), times=times),
        )

    for axis in _all_axes(layout):
        if axis.kind == "concatenation" and all(
            part.kind is None and part.is_whole and not part.strip.is_shifted for part in axis.parts
        ):
            strips = [part.strip for part in axis.parts]
            if len(set(strips)) == len(strips) and axis.size >= num_ranks:
                ranges = _along(even_parts(axis.size, num_ranks), [strip.size for strip in strips])
                add(
                    {
                        numbers.of[strip]: intervals
                        for strip, intervals in zip(strips, ranges, strict=True)
                        if strip in numbers.of
                    }
                )
        if axis.kind == "product":
            for outer, inner in pairwise(axis.parts):
                plain = (
                    all(part.kind is None and part.is_whole for part in (outer, inner))
                    and outer.strip is not inner.strip
                )
                if plain and 1 < outer.size < num_ranks <= outer.size * inner.size:
                    outers, inners = shared_parts(outer.size, inner.size, num_ranks)
                    add({numbers.of[outer.strip]: outers, numbers.of[inner.strip]: inners}, times=True)
        for strip in dict.fromkeys(leaf.strip for leaf in axis.leaves()):
            homes = sorted(strip.homes) if strip.is_shifted else ()
            for start, stop in [(0, strip.size), *homes]:
                if stop - start >= num_ranks and strip in numbers.of:
                    add({numbers.of[strip]: _around(start, stop, strip.size, num_ranks)})
    return list(found.values())


def _around(start: int, stop: int, size: int, num_ranks: int) -> tuple[Interval, ...]:
    """Even parts of a stretch; the first and the last rank have what lies around it.

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
    """The dim of a value whose rows go where a cut axis goes, the number of that axis, and the route. None:
    its parts are known beforehand."""
    if not numbers.routes or not isinstance(placement, Part):
        return None
    return next(
        (
            (dim, *found)
            for dim, axis in enumerate(axes)
            if (found := numbers.route(axis, placement.cut)) is not None
        ),
        None,
    )


def covers(axes: Iterable[Axis], cut: Cut, numbers: StripNumbers) -> bool:
    """Whether the ranks' parts of a value with these axes make up all of it, and those of ranks that share
    some overlap in blocks.

    A part of one axis times a part of another is not all there is, unless they were cut as a product; nor is
    a part times itself.
    """
    cut_axes = [axis for axis in axes if numbers.leaves(axis) & cut.parts.keys()]
    if len(cut_axes) > 1:
        touched = [numbers.leaves(axis) & cut.parts.keys() for axis in cut_axes]
        if (
            not cut.times
            or sum(map(len, touched)) > len(frozenset().union(*touched))
            or any(map(_is_joined, cut_axes))
        ):
            return False
    for axis in cut_axes:
        if axis.kind == "product" and not covers(axis.parts, cut, numbers):
            return False
        if axis.kind == "concatenation" and not all(covers((part,), cut, numbers) for part in axis.parts):
            return False
    return True


def _is_joined(axis: Axis) -> bool:
    """Whether a concatenation is in it."""
    return axis.kind == "concatenation" or any(map(_is_joined, axis.parts))


def runs_of(axis: Axis, cut: Cut | None, numbers: StripNumbers, rank: int) -> Runs | None:
    """The indices of an axis that a rank holds; None: all, whatever the rank."""
    if cut is None or not (numbers.leaves(axis) & cut.parts.keys()):
        return None
    routed = numbers.route(axis, cut)
    if routed is not None:
        return rows_expected(axis, *routed, cut, rank)
    return _runs(axis, cut, numbers, rank)


def rows_expected(axis: Axis, number: int, route: Route, cut: Cut, rank: int) -> Runs:
    """Of an axis that goes by a route where axis `number` goes: what a rank holds if all groups get as many
    rows."""
    first, last = (each * axis.size // route.groups.size for each in cut.parts[number][rank])
    return ((first, last),) if first < last else ()


def num_runs(axis: Axis, cut: Cut, numbers: StripNumbers, rank: int) -> int:
    """How many runs of an axis a rank holds, as in `runs_of` but not one after another."""
    routed = numbers.route(axis, cut)
    return (
        len(rows_expected(axis, *routed, cut, rank))
        if routed is not None
        else _edges(axis, cut, numbers, rank)[0]
    )


def _edges(axis: Axis, cut: Cut, numbers: StripNumbers, rank: int) -> tuple[int, int, bool, bool]:
    """How many runs a rank holds, and indices in them; whether the first begins where the axis does, and the
    last ends where that does."""
    if axis.kind is None:
        runs = stretch_of(axis, cut, numbers, rank)
        return (
            (1, runs[0][1] - runs[0][0], runs[0][0] == 0, runs[0][1] == axis.size)
            if runs
            else (0, 0, False, False)
        )
    first, *others = axis.parts
    count, size, begins, ends = _edges(first, cut, numbers, rank)
    for part in others:
        inner = _edges(part, cut, numbers, rank)
        if axis.kind == "concatenation":
            count, size, ends = count + inner[0] - (ends and inner[2]), size + inner[1], inner[3]
        elif inner[1] == part.size:
            size *= part.size
        else:  # a run in each index of the outer ones, of which those of neighbours may touch
            count = size * inner[0] - (size - count) * (inner[2] and inner[3])
            size, begins, ends = size * inner[1], begins and inner[2], ends and inner[3]
    return count, size, begins, ends


def _runs(axis: Axis, cut: Cut, numbers: StripNumbers, rank: int) -> Runs:
    return runs_in(axis, lambda leaf: stretch_of(leaf, cut, numbers, rank), lambda part: part.size)


def stretch_of(leaf: Axis, cut: Cut, numbers: StripNumbers, rank: int) -> Runs:
    """What a rank holds of an axis without parts: one run, or none."""
    strip, first, size = leaf.key
    number = numbers.of.get(strip)
    start, stop = cut.parts[number][rank] if number is not None and number in cut.parts else (0, strip.size)
    start, stop = max(start - first, 0), min(stop - first, size)
    return ((start, stop),) if start < stop else ()


def runs_in(axis: Axis, of_leaf: Callable[[Axis], Runs], size_of: Callable[[Axis], int]) -> Runs:
    """The runs of an axis, of those in the axes without parts that it is made of. size_of: an axis, in what
    runs are counted in."""
    if axis.kind is None:
        return of_leaf(axis)
    if axis.kind == "concatenation":
        found: list[Interval] = []
        offset = 0
        for part in axis.parts:
            found += [(offset + start, offset + stop) for start, stop in runs_in(part, of_leaf, size_of)]
            offset += size_of(part)
        return _joined(found)
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
    return _joined(runs)


def _joined(runs: Sequence[Interval]) -> Runs:
    """Runs that touch as one."""
    joined: list[Interval] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def _along(ranges: Sequence[Interval], sizes: Sequence[int]) -> list[tuple[Interval, ...]]:
    """Ranges over several parts in a row, as ranges within each.

    >>> _along([(0, 4), (4, 7)], [6, 1])
    [((0, 4), (4, 6)), ((0, 0), (0, 1))]
    """
    found: list[tuple[Interval, ...]] = []
    offset = 0
    for size in sizes:
        found.append(
            tuple(
                (min(max(start - offset, 0), size), max(min(stop - offset, size), 0))
                for start, stop in ranges
            )
        )
        offset += size
    return [
        tuple((start, max(start, stop)) if start < stop else (0, 0) for start, stop in row) for row in found
    ]


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
