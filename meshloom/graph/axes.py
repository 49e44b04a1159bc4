"""Axes: what the dims of a program's values stand for.

Two dims that an operator pairs (the inner dims of a product, the dims of a sum) are one axis. A dim that is reshaped or cut up is an
axis with parts: a product (heads x head size, outermost first) or a concatenation (q | k | v). Axes are found out as the program is
followed, so an axis may get parts later, and then all dims that are that axis have them.

    qkv = linear(x, w)        dim 0 of w and the last dim of qkv: one axis of 30
    q, k, v = qkv.split(10)   which is a | b | c
    q.view(..., 2, 5)         and a is heads x size
    attention(q, k, v)        heads of a, b and c are one axis
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Literal

Kind = Literal["product", "concatenation"]
MOST_PARTS = 32  # of two axes together that are made one, where that splits any of them; else they stay two


class Axis:
    """An axis, while it is still being found out what it is equal to and made of. Compare axes by `axis.root`.

    equal_to: the axis that speaks for this one. own_kind, own_parts: of an axis that speaks for itself.
    """

    __slots__ = ("equal_to", "own_kind", "own_parts", "size")

    def __init__(self, size: int, kind: Kind | None = None, parts: Sequence[Axis] = ()) -> None:
        self.size = size
        self.equal_to: Axis | None = None
        self.own_kind: Kind | None = kind
        self.own_parts: tuple[Axis, ...] = tuple(parts)

    @property
    def root(self) -> Axis:
        """The axis that all those equal to this one share."""
        axis = self
        while axis.equal_to is not None:
            axis = axis.equal_to
        if self is not axis:
            self.equal_to = axis
        return axis

    @property
    def kind(self) -> Kind | None:
        """None: it has no parts."""
        return self.root.own_kind

    @property
    def parts(self) -> tuple[Axis, ...]:
        """Of a product, outermost first; of a concatenation, in order."""
        return self.root.own_parts

    def leaves(self) -> Iterator[Axis]:
        """The axes without parts that it is made of, each as often as it occurs."""
        root = self.root
        if root.own_kind is None:
            yield root
        for part in root.own_parts:
            yield from part.leaves()

    def __repr__(self) -> str:
        mark = {None: "", "product": " x ", "concatenation": " | "}[self.kind]
        return f"({mark.join(map(repr, self.parts))})" if self.kind else str(self.size)


def product(parts: Sequence[Axis]) -> Axis:
    """The axis of `parts`, outermost first; parts of size 1 do not count."""
    flat = [each for part in parts for each in (part.parts if part.kind == "product" else (part,)) if each.size != 1]
    if len(flat) == 1:
        return flat[0]
    return Axis(math.prod(part.size for part in flat), "product", flat) if flat else Axis(1)


def concatenation(parts: Sequence[Axis]) -> Axis:
    """The axis of `parts` one after another; empty ones do not count."""
    flat = [each for part in parts for each in (part.parts if part.kind == "concatenation" else (part,)) if each.size]
    if len(flat) == 1:
        return flat[0]
    return Axis(sum(part.size for part in flat), "concatenation", flat) if flat else Axis(0)


def unify(one: Axis, other: Axis) -> bool:
    """Make two axes one, giving both the parts that either has. False: their parts do not fit, and they stay two.

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
    one, other = one.root, other.root
    if one is other:
        return True
    if one.size != other.size:
        return False
    if one.own_kind is None or other.own_kind is None:
        leaf, kept = (one, other) if one.own_kind is None else (other, one)
        leaf.equal_to = kept
        return True
    if one.own_kind != other.own_kind:
        return False
    aligned = _align(one, other)
    if aligned is None or not all(unify(mine, theirs) for mine, theirs in aligned):
        return False
    one, other = one.root, other.root
    if one is not other:
        other.equal_to = one
    return True


def _align(one: Axis, other: Axis) -> list[tuple[Axis, Axis]] | None:
    """Parts of both, in pairs of equal size, after leaves were split where the other has a boundary."""
    mine, theirs = list(_flat(one)), list(_flat(other))
    if not _fit(mine, theirs, one.own_kind) or (one.own_kind == "concatenation" and _without_end(mine, theirs)):
        return None
    pairs: list[tuple[Axis, Axis]] = []
    while mine and theirs:
        a, b = mine.pop(0), theirs.pop(0)
        if a.size != b.size and one.own_kind in (a.kind, b.kind):  # a leaf that occurs twice was split where it occurred first
            mine = [*(_flat(a.root) if a.kind == one.own_kind else (a,)), *mine]
            theirs = [*(_flat(b.root) if b.kind == one.own_kind else (b,)), *theirs]
            continue
        if a.size != b.size and (max(a, b, key=_size).kind is not None or (one.own_kind == "product" and max(a.size, b.size) % min(a.size, b.size))):
            return None
        if a.size < b.size:
            first, rest = _split(b, a.size, one.own_kind)
            b, theirs = first, [rest, *theirs]
        elif a.size > b.size:
            first, rest = _split(a, b.size, one.own_kind)
            a, mine = first, [rest, *mine]
        pairs.append((a, b))
    one.own_parts = _flat(one)
    other.own_parts = _flat(other)
    return pairs


def _size(axis: Axis) -> int:
    return axis.size


def _fit(mine: list[Axis], theirs: list[Axis], kind: Kind | None) -> bool:
    """Whether every boundary of one falls on a boundary of the other or into a leaf."""
    left, right = [(part.size, part) for part in mine], [(part.size, part) for part in theirs]
    while left and right:
        (a, part_a), (b, part_b) = left.pop(0), right.pop(0)
        if a == b:
            continue
        large, small, part, rest = (a, b, part_a, left) if a > b else (b, a, part_b, right)
        if part.kind is not None or (kind == "product" and large % small):
            return False
        rest.insert(0, (large // small if kind == "product" else large - small, part))
    return not left and not right


def _without_end(mine: Sequence[Axis], theirs: Sequence[Axis]) -> bool:
    """Whether a leaf lies beside itself a few places on, as in x[1:] + x[:-1], or would be split into more than `MOST_PARTS`.

    Each boundary in it would be another one there, and so on: as many parts as the axis has indices. How many there are is to follow from how the
    program is written, and never from sizes.

        1 | rest            a boundary after 1, so rest is 1 | ...
        rest | 1            so above there is one after 2, so rest is 1 | 1 | ...
    """
    sides = [list(accumulate((part.size for part in side), initial=0)) for side in (mine, theirs)]
    leaves = [[part.root for part in side] for side in (mine, theirs)]
    found_at: dict[Axis, list[tuple[int, int]]] = {}  # leaf -> side and offset of its occurrences
    for side in (0, 1):
        for leaf, start in zip(leaves[side], sides[side], strict=False):
            found_at.setdefault(leaf, []).append((side, start))
    pending = [(side, start, frozenset[Axis]()) for side in (0, 1) for start in sides[side][1:-1]]
    known: set[tuple[Axis, int]] = set()
    num_parts = len(mine) + len(theirs)
    while pending:
        side, offset, through = pending.pop()  # a boundary, and the leaves whose boundaries it comes from
        other = 1 - side
        place = bisect_right(sides[other], offset) - 1
        leaf, inside = leaves[other][place], offset - sides[other][place]
        if not inside or (leaf, inside) in known:
            continue
        if leaf in through:
            return True
        known.add((leaf, inside))
        num_parts += len(found_at[leaf])
        if num_parts > MOST_PARTS:
            return True
        pending += [(at, start + inside, through | {leaf}) for at, start in found_at[leaf]]
    return False


def _split(axis: Axis, first: int, kind: Kind | None) -> tuple[Axis, Axis]:
    """A leaf as two."""
    root = axis.root
    rest = root.size // first if kind == "product" else root.size - first
    root.own_kind, root.own_parts = kind, (Axis(first), Axis(rest))
    return root.own_parts[0], root.own_parts[1]


def _flat(axis: Axis) -> tuple[Axis, ...]:
    """Parts with those of their own kind taken apart."""
    found: list[Axis] = []
    for part in axis.own_parts:
        found.extend(_flat(part.root) if part.kind == axis.own_kind else (part,))
    return tuple(found)
