"""Axes: what the dims of a program's values stand for.

Two dims that an operator pairs (the inner dims of a product, the dims of a sum) are the same axis. A dim that
is reshaped or split is an axis with parts: a product (heads x head size, outermost first) or a concatenation
(q | k | v). Axes are inferred while the program is traversed. If an axis turns out to have parts, all dims
that are this axis have them.

    qkv = linear(x, w)        dim 0 of w and the last dim of qkv: one axis of 30
    q, k, v = qkv.split(10)   its intervals [0, 10), [10, 20) and [20, 30)
    q.view(..., 2, 5)         the first interval is heads x size
    attention(q, k, v)        the heads of all three are one axis

An axis without parts is an interval ("stretch") of a *strip*, given by its start and size. Taking an interval
of it adds no parts, so that values that are shifted, padded or windowed against themselves have as many parts
for a million tokens as for ten.

    x                         X[0, T)
    x[:, 1:]                  X[1, T)
    pad(x[:, 1:], (0, 1))     X[1, T) | p
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Literal

Kind = Literal["product", "concatenation"]
Key = tuple["Strip", int, int]


class Strip:
    """A range of indices. Without parts it is what gets sharded; otherwise it consists of its parts, or is
    the same as another axis.

    boundaries: where intervals taken from it begin and end.
    axis_intervals: intervals (start, stop) that are a full axis elsewhere.
    is_shifted: an interval of it is paired with one that overlaps it, as in x[1:] + x[:-1].
    """

    __slots__ = ("axis_intervals", "boundaries", "ends", "is_shifted", "kind", "parts", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.kind: Kind | Literal["same"] | None = None
        self.parts: tuple[Axis, ...] = ()  # of kind `same`: the one axis that it is the same as
        self.ends: tuple[int, ...] = ()  # ends of the parts of a concatenation
        self.boundaries: frozenset[int] = frozenset()
        self.axis_intervals: frozenset[tuple[int, int]] = frozenset()
        self.is_shifted = False

    def set_parts(self, kind: Kind | Literal["same"], parts: Sequence[Axis]) -> None:
        """Replaces a strip without parts by its parts."""
        self.kind, self.parts = kind, tuple(parts)
        self.ends = tuple(accumulate(part.size for part in parts)) if kind == "concatenation" else ()


class Axis:
    """An interval of a strip, whose parts may still be inferred. `Axis(size)` is a new axis.

    Compare axes by `key`.
    """

    __slots__ = ("_key", "_leaves", "_parts", "_start", "_strip", "size")

    def __init__(self, size: int, strip: Strip | None = None, start: int = 0) -> None:
        self.size = size
        self._strip = Strip(size) if strip is None else strip
        self._start = start
        self._key: Key | None = None  # this and the next two are cached after `freeze`
        self._parts: tuple[Axis, ...] | None = None
        self._leaves: tuple[Axis, ...] | None = None

    @property
    def key(self) -> Key:
        """Its strip, start and size: equal for the same axis."""
        if self._key is not None:
            return self._key
        strip, start = self._strip, self._start
        while strip.kind is not None:
            if strip.kind == "same":
                (other,) = strip.parts
                strip, start = other._strip, other._start + start
                continue
            if strip.kind == "product" or self.size == strip.size:
                break
            place = min(bisect_right(strip.ends, start), len(strip.ends) - 1)
            if start + self.size > strip.ends[place]:
                break
            part = strip.parts[place]
            strip, start = part._strip, part._start + start - strip.ends[place] + part.size
        return strip, start, self.size

    def shorten_path(self) -> None:
        """Shortens its path of `same` strips, as in union-find. Steps on this path are never undone."""
        pending: list[Axis] = [self]
        while pending:
            axis = pending.pop()
            way = [axis]  # paths that end in the same strip share their last steps
            while way[-1]._strip.kind == "same":
                way += way[-1]._strip.parts
            for each in reversed(way):
                # frozen axes may have been unified with others since
                each._key = each._parts = each._leaves = None
                each._strip, each._start, _ = each.key
            pending += axis._strip.parts

    def freeze(self) -> None:
        """Caches its key and parts: no strip changes after this."""
        parts = self.parts if self.kind == "concatenation" else ()
        key = parts[0].key if len(parts) == 1 else self.key
        self._strip, self._start, _ = self._key = key

    @property
    def strip(self) -> Strip:
        """The strip that it is an interval of."""
        return self.key[0]

    @property
    def start(self) -> int:
        """Its first index in the strip."""
        return self.key[1]

    @property
    def stop(self) -> int:
        """The strip's index after its last."""
        return self.key[1] + self.size

    @property
    def is_whole(self) -> bool:
        """Whether it spans its strip."""
        return self.key[0].size == self.size

    @property
    def kind(self) -> Kind | None:
        """Product or concatenation; None: it has no parts."""
        kind = self.key[0].kind
        assert kind != "same"
        return kind

    @property
    def parts(self) -> tuple[Axis, ...]:
        """The parts of a product, outermost first, or of a concatenation, in order. None of them has the
        axis's own kind."""
        if self._parts is not None:
            return self._parts
        kind = self.kind
        found: list[Axis] = []
        pending = list(reversed(self._inside()))
        while pending:
            part = pending.pop()
            if part.kind == kind:
                pending += reversed(part._inside())
            elif kind == "concatenation" and found and _touch(found[-1], part):
                found[-1] = Axis(found[-1].size + part.size, part.strip, found[-1].start)
            else:
                found.append(part)
        if self._key is not None:
            for part in found:
                part.freeze()
            self._parts = tuple(found)
        return tuple(found)

    def _inside(self) -> list[Axis]:
        """Its parts in its strip, which may have its own kind."""
        strip, start, size = self.key
        parts = list(strip.parts)
        if size == strip.size:
            return parts
        if strip.kind == "product":
            count = strip.size // parts[0].size
            assert start % count == 0 and size % count == 0, (
                f"[{start}, {start + size}) of {Axis(strip.size, strip)}"
            )
            return [parts[0].stretch(start // count, (start + size) // count), *parts[1:]]
        first, last = bisect_right(strip.ends, start), bisect_left(strip.ends, start + size)
        pieces = zip(strip.ends[first : last + 1], parts[first : last + 1], strict=True)
        return [
            part.stretch(max(start - end + part.size, 0), min(start + size - end + part.size, part.size))
            for end, part in pieces
        ]  # fmt: skip

    def stretch(self, start: int, stop: int) -> Axis:
        """The axis of indices `start` to `stop`. `fits` says whether there is one."""
        return self if stop - start == self.size else Axis(stop - start, self._strip, self._start + start)

    def leaves(self) -> Iterator[Axis]:
        """The axes without parts that it consists of, each as often as it occurs."""
        if self._leaves is not None:
            yield from self._leaves
            return
        pending: list[Axis] = [self]
        found: list[Axis] = []
        while pending:
            axis = pending.pop()
            if axis.kind is None:
                found.append(axis)
            else:
                pending += reversed(axis.parts)
        if self._key is not None:
            self._leaves = tuple(found)
        yield from found

    def __repr__(self) -> str:
        """Its structure with the sizes of strips, and the intervals of partial ones."""
        shown: list[str] = []
        pending: list[Axis | str] = [self]
        while pending:
            each = pending.pop()
            if isinstance(each, str):
                shown.append(each)
            elif each.kind is None:
                shown.append(
                    str(each.size) if each.is_whole else f"{each.strip.size}[{each.start}:{each.stop}]"
                )
            else:
                inner: list[Axis | str] = [each.parts[0]]
                for part in each.parts[1:]:
                    inner += [" x " if each.kind == "product" else " | ", part]
                pending += [")", *reversed(inner), "("]
        return "".join(shown)


def product(parts: Sequence[Axis]) -> Axis:
    """The product of axes, outermost first; those of size 1 are left out."""
    factors = [part for part in parts if part.size != 1 or not part.is_whole]
    return _composed("product", factors, math.prod(part.size for part in parts))


def concatenation(parts: Sequence[Axis]) -> Axis:
    """The concatenation of axes; empty ones are left out."""
    return _composed("concatenation", [part for part in parts if part.size], sum(part.size for part in parts))


def _composed(kind: Kind, parts: Sequence[Axis], size: int) -> Axis:
    if len(parts) == 1:
        return parts[0]
    strip = Strip(size)
    if parts and size:
        strip.set_parts(kind, parts)
        parts = Axis(size, strip).parts
    return parts[0] if len(parts) == 1 else Axis(size, strip)


def place_of(axis: Axis, offset: int) -> tuple[Strip, int] | None:
    """The strip without parts, and the index in it, at which an axis is split before its index `offset`.
    None: it cannot be split there."""
    while axis.kind is not None and 0 < offset < axis.size:
        if axis.kind == "concatenation":
            for part in axis.parts:
                if offset < part.size:
                    axis = part
                    break
                offset -= part.size
        else:
            outer, *inner = axis.parts
            count = math.prod(part.size for part in inner)
            if offset % count:
                return None
            axis, offset = outer, offset // count
    if axis.kind is None:
        return axis.strip, axis.start + offset
    # it can be one now, if the parts of a concatenation are adjacent intervals of a strip
    leaves = list(axis.leaves())
    return (leaves[0].strip, leaves[0].start) if offset == 0 else (leaves[-1].strip, leaves[-1].stop)


def fits(axis: Axis, start: int, stop: int) -> bool:
    """Whether an interval of an axis is an axis: in a product, only intervals of complete rows are."""
    return place_of(axis, start) is not None and place_of(axis, stop) is not None


def _touch(one: Axis, other: Axis) -> bool:
    """Whether an axis is the interval right before another one, in the same strip."""
    return one.kind is None and other.kind is None and one.strip is other.strip and one.stop == other.start
