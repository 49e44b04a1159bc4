"""Makes two axes one, which gives both the parts that either has; or says that they have to stay two."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from meshloom.tensor_parallel.layout.axes import Axis, Strip, fits, place_of, product

# that a strip is left in because stretches of it were taken; a loop that takes index after index leaves it as
# it is
MOST_PIECES = 16

Pairs = list[tuple[Axis, Axis]]
Saved = dict[Strip, tuple[Any, ...]]  # strips as they were


def unify(one: Axis, other: Axis) -> bool:
    """Make two axes one, giving both the parts that either has. False: their parts do not fit, and all stays
    as it was.

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
        axis.shorten()
    if one.size == other.size and _unified(one, other, saved):
        return True
    for strip, (kind, parts, ends, marks, homes) in saved.items():
        strip.kind, strip.parts, strip.ends, strip.marks, strip.homes = kind, parts, ends, marks, homes
    return False


def mark(axis: Axis, offsets: Iterable[int], saved: Saved | None = None) -> None:
    """Note that stretches of an axis begin or end there. It can be cut at each of these places."""
    for offset in offsets:
        if 0 < offset < axis.size:
            found = place_of(axis, offset)
            assert found is not None
            _save(found[0], saved)
            found[0].marks |= {found[1]}


def settle(axes: Collection[Axis]) -> None:
    """Take strips apart where they are several axes elsewhere (a | b), or where a few stretches of them were
    taken (q, k, v).

    What lies beside itself stays in one: x[1:] and x[:-1] are cut where x is.
    """
    for axis in axes:
        axis.shorten()
    strips = dict.fromkeys(leaf.strip for axis in axes for leaf in axis.leaves())
    for strip in [each for each in strips if not each.is_shifted]:
        places = {place for home in strip.homes if home[1] - home[0] > 1 for place in home}
        every = sorted({0, strip.size} | places | strip.marks)
        if len(every) <= MOST_PIECES + 1 and all(stop - start > 1 for start, stop in pairwise(every)):
            places |= strip.marks
        _split(strip, places)
    for axis in axes:
        axis.settled()


def _unified(one: Axis, other: Axis, saved: Saved) -> bool:
    pending = [(one, other)]
    while pending:
        mine, theirs = pending.pop()
        if mine.key == theirs.key or not mine.size:
            continue
        if "concatenation" in (mine.kind, theirs.kind):
            pairs = _beside(mine, theirs)
        elif mine.kind == theirs.kind == "product":
            pairs = _factors(mine, theirs, saved)
        elif mine.kind is None and theirs.kind is None:
            pairs = _joined(mine, theirs, saved)
        else:
            pairs = _shaped(mine, theirs, saved) if mine.kind is None else _shaped(theirs, mine, saved)
        # all of them are looked at: a strip that is shifted is to be known as one
        if pairs is None or sum(_clash(*pair) for pair in pairs):
            return False
        pending += reversed(pairs)
    return True


def _beside(one: Axis, other: Axis) -> Pairs | None:
    """The parts of two axes, in pairs of equal size. None: one has a boundary where the other cannot be
    cut."""
    mine, theirs = (
        list(reversed(axis.parts if axis.kind == "concatenation" else (axis,))) for axis in (one, other)
    )
    pairs: Pairs = []
    while mine and theirs:
        a, b = mine.pop(), theirs.pop()
        size = min(a.size, b.size)
        if a.size > size:
            if not fits(a, 0, size):
                return None
            mine.append(a.stretch(size, a.size))
            a = a.stretch(0, size)
        elif b.size > size:
            if not fits(b, 0, size):
                return None
            theirs.append(b.stretch(size, b.size))
            b = b.stretch(0, size)
        pairs.append((a, b))
    return pairs


def _clash(one: Axis, other: Axis) -> bool:
    """Whether stretches of one strip can not be made one: each index would be the one a few places on, and so
    would that."""
    if (
        one.kind is not None
        or other.kind is not None
        or one.strip is not other.strip
        or one.start == other.start
    ):
        return False
    if one.start < other.stop and other.start < one.stop:
        one.strip.is_shifted = True
    return one.strip.is_shifted or one.size == 1


def _joined(one: Axis, other: Axis, saved: Saved) -> Pairs | None:
    """Two stretches of strips, made one."""
    if _clash(one, other):
        return None
    if one.strip is other.strip:  # as q, k and v are of what they were packed in
        _split(one.strip, (one.start, one.stop, other.start, other.stop), saved)
    elif not one.is_whole and not other.is_whole:
        if one.size == 1 or (one.strip.is_shifted and other.strip.is_shifted):
            return None
        cut = other if one.strip.is_shifted else one
        _split(cut.strip, (cut.start, cut.stop), saved)
    if other.is_whole:
        _be_same(other.strip, one, saved)
    else:
        _be_same(one.strip, other, saved)
    return []


def _shaped(one: Axis, shape: Axis, saved: Saved) -> Pairs | None:
    """A stretch of a strip and a product, made one."""
    strip, start = one.strip, one.start
    inside = [place - start for place in strip.marks if start < place < one.stop]
    if any(leaf.strip is strip for leaf in shape.leaves()) or any(
        place_of(shape, offset) is None for offset in inside
    ):
        return None
    if not one.is_whole:
        if strip.is_shifted or one.size == 1:
            return None
        _split(strip, (start, one.stop), saved)
    _be_same(one.strip, shape, saved)
    return []


def _factors(one: Axis, other: Axis, saved: Saved) -> Pairs | None:
    """The parts of two products, in pairs of equal size, after those without parts were made products where
    the other has a boundary."""
    if not _divide(one.parts, other.parts):
        return None
    mine, theirs = list(reversed(one.parts)), list(reversed(other.parts))
    pairs: Pairs = []
    while mine and theirs:
        a, b = mine.pop(), theirs.pop()
        if "product" in (a.kind, b.kind):  # one that occurs twice was made one where it occurred first
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
            _be_same(large.strip, product(shape), saved)
            mine += reversed(a.parts if large is a else (a,))
            theirs += reversed(b.parts if large is b else (b,))
            continue
        pairs.append((a, b))
    return pairs


def _divide(mine: Sequence[Axis], theirs: Sequence[Axis]) -> bool:
    """Whether every boundary of one product is one of the other, or falls into what can be made a product."""
    left, right = (
        [(part.size, part) for part in reversed(mine)],
        [(part.size, part) for part in reversed(theirs)],
    )
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
    """Whether an axis can be made a product of `first` and what is left."""
    if axis.kind is not None or axis.size % first or (axis.strip.is_shifted and not axis.is_whole):
        return False
    rest = axis.size // first
    return all(
        (place - axis.start) % rest == 0 for place in axis.strip.marks if axis.start < place < axis.stop
    )


def _be_same(strip: Strip, axis: Axis, saved: Saved) -> None:
    """A strip without parts is an axis of its size: what is known of stretches of it is known of that."""
    mark(axis, strip.marks, saved)
    if axis.kind is None:
        inner, start = axis.strip, axis.start
        _save(inner, saved)
        inner.homes |= {(start + first, start + last) for first, last in strip.homes}
        if not axis.is_whole:
            inner.homes |= {(start, axis.stop)}
            inner.marks |= {start, axis.stop}
    for leaf in _outermost(axis) if strip.is_shifted else ():
        leaf.strip.is_shifted = True
    _save(strip, saved)
    inner, start, size = axis.key
    strip.become("same", (Axis(size, inner, start),))


def _outermost(axis: Axis) -> Iterator[Axis]:
    """Of each product only what its outermost part is made of: that is what is shifted with it."""
    pending = [axis]
    while pending:
        each = pending.pop()
        if each.kind is None:
            yield each
        else:
            pending += reversed(each.parts if each.kind == "concatenation" else each.parts[:1])


def _split(strip: Strip, places: Iterable[int], saved: Saved | None = None) -> None:
    """A strip without parts as several, one after another."""
    bounds = sorted({0, strip.size, *places})
    if len(bounds) == 2:
        return
    pieces = [Axis(stop - start) for start, stop in pairwise(bounds)]
    for piece, start in zip(pieces, bounds, strict=False):
        stop = start + piece.size
        piece.strip.marks = frozenset(place - start for place in strip.marks if start < place < stop)
        piece.strip.homes = frozenset(
            (first - start, last - start)
            for first, last in strip.homes
            if start <= first and last <= stop and last - first < piece.size
        )
    _save(strip, saved)
    strip.become("concatenation", pieces)


def _save(strip: Strip, saved: Saved | None) -> None:
    if saved is not None:
        saved.setdefault(strip, (strip.kind, strip.parts, strip.ends, strip.marks, strip.homes))
