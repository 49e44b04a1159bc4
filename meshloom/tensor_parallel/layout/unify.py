"""Unification: makes two axes the same axis, with the parts of both, or finds that this is impossible."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from meshloom.tensor_parallel.layout.axes import Axis, Strip, fits, place_of, product

# of a strip that is split at its boundaries; a loop over single indices leaves its strip unsplit
MOST_PIECES = 16

Pairs = list[tuple[Axis, Axis]]
Saved = dict[Strip, tuple[Any, ...]]  # the state of strips before a change


def unify(one: Axis, other: Axis) -> bool:
    """Makes two axes the same axis, with the parts of both. False: their parts do not match, and nothing has
    changed.

    >>> heads_and_size, packed = product([Axis(4), Axis(6)]), Axis(24)
    >>> unify(heads_and_size, packed)
    True
    >>> packed
    (4 x 6)
    >>> unify(packed, product([Axis(8), Axis(3)]))
    True
    >>> packed
    (4 x 2 x 3)
    >>> unify(packed, product([Axis(3), Axis(8)]))
    False
    """
    saved: Saved = {}
    for axis in (one, other):
        axis.shorten_path()
    if one.size == other.size and _unified(one, other, saved):
        return True
    for strip, (kind, parts, ends, boundaries, axis_intervals) in saved.items():
        strip.kind, strip.parts, strip.ends = kind, parts, ends
        strip.boundaries, strip.axis_intervals = boundaries, axis_intervals
    return False


def add_boundaries(axis: Axis, offsets: Iterable[int], saved: Saved | None = None) -> None:
    """Records that intervals of an axis begin or end at these offsets, at each of which it can be split."""
    for offset in offsets:
        if 0 < offset < axis.size:
            found = place_of(axis, offset)
            assert found is not None
            _save(found[0], saved)
            found[0].boundaries |= {found[1]}


def freeze_axes(axes: Collection[Axis]) -> None:
    """Splits strips that are several axes elsewhere (a | b), or of which a few intervals were taken (q, k,
    v), and freezes all axes.

    A shifted strip stays unsplit: x[1:] and x[:-1] are sharded as x is.
    """
    for axis in axes:
        axis.shorten_path()
    strips = dict.fromkeys(leaf.strip for axis in axes for leaf in axis.leaves())
    for strip in [each for each in strips if not each.is_shifted]:
        places = {
            place for interval in strip.axis_intervals if interval[1] - interval[0] > 1 for place in interval
        }
        every = sorted({0, strip.size} | places | strip.boundaries)
        if len(every) <= MOST_PIECES + 1 and all(stop - start > 1 for start, stop in pairwise(every)):
            places |= strip.boundaries
        _split(strip, places)
    for axis in axes:
        axis.freeze()


def _unified(one: Axis, other: Axis, saved: Saved) -> bool:
    pending = [(one, other)]
    while pending:
        mine, theirs = pending.pop()
        if mine.key == theirs.key or not mine.size:
            continue
        if "concatenation" in (mine.kind, theirs.kind):
            pairs = _concatenation_pairs(mine, theirs)
        elif mine.kind == theirs.kind == "product":
            pairs = _product_pairs(mine, theirs, saved)
        elif mine.kind is None and theirs.kind is None:
            pairs = _unify_leaves(mine, theirs, saved)
        else:
            leaf, shape = (mine, theirs) if mine.kind is None else (theirs, mine)
            pairs = _unify_with_product(leaf, shape, saved)
        # no early exit: every shifted strip must be recorded
        if pairs is None or sum(_is_shift(*pair) for pair in pairs):
            return False
        pending += reversed(pairs)
    return True


def _concatenation_pairs(one: Axis, other: Axis) -> Pairs | None:
    """The parts of two axes in pairs of equal size. None: one has a boundary where the other cannot be
    split."""
    mine, theirs = (
        list(reversed(axis.parts if axis.kind == "concatenation" else (axis,))) for axis in (one, other)
    )
    pairs: Pairs = []
    while mine and theirs:
        a, b = mine.pop(), theirs.pop()
        size = min(a.size, b.size)
        for part, rest in ((a, mine), (b, theirs)):
            if part.size > size:
                if not fits(part, 0, size):
                    return None
                rest.append(part.stretch(size, part.size))
        pairs.append((a.stretch(0, size), b.stretch(0, size)))
    return pairs


def _is_shift(one: Axis, other: Axis) -> bool:
    """Whether two intervals are of one strip, and cannot be unified: each index would equal one a few
    positions later, which would equal another, and so on."""
    if one.kind is not None or other.kind is not None:
        return False
    if one.strip is not other.strip or one.start == other.start:
        return False
    if one.start < other.stop and other.start < one.stop:
        one.strip.is_shifted = True
    return one.strip.is_shifted or one.size == 1


def _unify_leaves(one: Axis, other: Axis, saved: Saved) -> Pairs | None:
    """Unifies two axes without parts."""
    if _is_shift(one, other):
        return None
    if one.strip is other.strip:  # such as q, k and v in their packed projection
        _split(one.strip, (one.start, one.stop, other.start, other.stop), saved)
    elif not one.is_whole and not other.is_whole:
        if one.size == 1 or (one.strip.is_shifted and other.strip.is_shifted):
            return None
        cut = other if one.strip.is_shifted else one
        _split(cut.strip, (cut.start, cut.stop), saved)
    if other.is_whole:
        _make_same(other.strip, one, saved)
    else:
        _make_same(one.strip, other, saved)
    return []


def _unify_with_product(one: Axis, shape: Axis, saved: Saved) -> Pairs | None:
    """Unifies an axis without parts with a product."""
    strip, start = one.strip, one.start
    inside = [place - start for place in strip.boundaries if start < place < one.stop]
    if any(leaf.strip is strip for leaf in shape.leaves()) or any(
        place_of(shape, offset) is None for offset in inside
    ):
        return None
    if not one.is_whole:
        if strip.is_shifted or one.size == 1:
            return None
        _split(strip, (start, one.stop), saved)
    _make_same(one.strip, shape, saved)
    return []


def _product_pairs(one: Axis, other: Axis, saved: Saved) -> Pairs | None:
    """The parts of two products in pairs of equal size. Parts are made products where the other axis has a
    boundary."""
    if not _can_pair(one.parts, other.parts):
        return None
    mine, theirs = list(reversed(one.parts)), list(reversed(other.parts))
    pairs: Pairs = []
    while mine and theirs:
        a, b = mine.pop(), theirs.pop()
        if "product" in (a.kind, b.kind):  # a part that occurs twice became one at its first occurrence
            mine += reversed(a.parts if a.kind == "product" else (a,))
            theirs += reversed(b.parts if b.kind == "product" else (b,))
            continue
        if a.size != b.size:
            large, small = (a, b) if a.size > b.size else (b, a)
            if not _can_divide(large, small.size):
                return None
            if not large.is_whole:
                _split(large.strip, (large.start, large.stop), saved)
            shape = (Axis(small.size), Axis(large.size // small.size))
            _make_same(large.strip, product(shape), saved)
            mine += reversed(a.parts if large is a else (a,))
            theirs += reversed(b.parts if large is b else (b,))
            continue
        pairs.append((a, b))
    return pairs


def _can_pair(mine: Sequence[Axis], theirs: Sequence[Axis]) -> bool:
    """Whether every boundary of one product is a boundary of the other, or lies in an axis that can be made a
    product."""
    left, right = ([(part.size, part) for part in reversed(parts)] for parts in (mine, theirs))
    while left and right:
        (a, part_a), (b, part_b) = left.pop(), right.pop()
        if a == b:
            continue
        large, small, part, rest = (a, b, part_a, left) if a > b else (b, a, part_b, right)
        if small == 1 or large % small or (part.size == large and not _can_divide(part, small)):
            return False
        rest.append((large // small, part))
    return not left and not right


def _can_divide(axis: Axis, first: int) -> bool:
    """Whether an axis can be made a product of `first` and the rest."""
    if axis.kind is not None or axis.size % first or (axis.strip.is_shifted and not axis.is_whole):
        return False
    rest = axis.size // first
    inside = (place for place in axis.strip.boundaries if axis.start < place < axis.stop)
    return all((place - axis.start) % rest == 0 for place in inside)


def _make_same(strip: Strip, axis: Axis, saved: Saved) -> None:
    """Makes a strip without parts the same as an axis, which inherits its boundaries and intervals."""
    add_boundaries(axis, strip.boundaries, saved)
    if axis.kind is None:
        inner, start = axis.strip, axis.start
        _save(inner, saved)
        inner.axis_intervals |= {(start + first, start + last) for first, last in strip.axis_intervals}
        if not axis.is_whole:
            inner.axis_intervals |= {(start, axis.stop)}
            inner.boundaries |= {start, axis.stop}
    for leaf in _outermost(axis) if strip.is_shifted else ():
        leaf.strip.is_shifted = True
    _save(strip, saved)
    inner, start, size = axis.key
    strip.set_parts("same", (Axis(size, inner, start),))


def _outermost(axis: Axis) -> Iterator[Axis]:
    """The leaves of an axis, but of each product only those of its outermost part: only these are shifted
    with it."""
    pending = [axis]
    while pending:
        each = pending.pop()
        if each.kind is None:
            yield each
        else:
            pending += reversed(each.parts if each.kind == "concatenation" else each.parts[:1])


def _split(strip: Strip, places: Iterable[int], saved: Saved | None = None) -> None:
    """Splits a strip without parts at `places`."""
    bounds = sorted({0, strip.size, *places})
    if len(bounds) == 2:
        return
    pieces = [Axis(stop - start) for start, stop in pairwise(bounds)]
    for piece, start in zip(pieces, bounds, strict=False):
        stop = start + piece.size
        piece.strip.boundaries = frozenset(
            place - start for place in strip.boundaries if start < place < stop
        )
        piece.strip.axis_intervals = frozenset(
            (first - start, last - start)
            for first, last in strip.axis_intervals
            if start <= first and last <= stop and last - first < piece.size
        )
    _save(strip, saved)
    strip.set_parts("concatenation", pieces)


def _save(strip: Strip, saved: Saved | None) -> None:
    if saved is not None:
        saved.setdefault(strip, (strip.kind, strip.parts, strip.ends, strip.boundaries, strip.axis_intervals))
