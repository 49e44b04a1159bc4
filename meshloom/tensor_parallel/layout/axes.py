"""Axes: what the dims of a program's values stand for.

Two dims that an operator pairs (the inner dims of a product, the dims of a sum) are one axis. A dim that is
reshaped or cut up is an axis with parts: a product (heads x head size, outermost first) or a concatenation (q
| k | v). Axes are found out as the program is followed, so an axis may get parts later, and then all dims that are that axis have them.

    qkv = linear(x, w)        dim 0 of w and the last dim of qkv: one axis of 30
    q, k, v = qkv.split(10)   which has stretches [0, 10), [10, 20) and [20, 30)
    q.view(..., 2, 5)         and of which the first is heads x size
    attention(q, k, v)        heads of all three are one axis

An axis without parts is a stretch of a *strip*: from which index on, and how many. To take a stretch of it
makes no parts, only numbers, so that what is shifted, padded or windowed against itself is of as many parts
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
    """Indices in a row. Without parts they are what is cut; else they are those of its parts, or of the axis
    that it was found to be the same as.

    marks: where stretches that were taken of it begin and end. homes: stretches, from and up to, that are a
    whole axis elsewhere. is_shifted: a stretch of it lies beside one that overlaps it, as in x[1:] + x[:-1].
    """

    __slots__ = ("ends", "homes", "is_shifted", "kind", "marks", "parts", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.kind: Kind | Literal["same"] | None = None
        self.parts: tuple[Axis, ...] = ()  # of kind `same` one, which is all of it
        self.ends: tuple[int, ...] = ()  # of the parts of a concatenation
        self.marks: frozenset[int] = frozenset()
        self.homes: frozenset[tuple[int, int]] = frozenset()
        self.is_shifted = False

    def become(self, kind: Kind | Literal["same"], parts: Sequence[Axis]) -> None:
        """It has these parts from now on."""
        self.kind, self.parts = kind, tuple(parts)
        self.ends = tuple(accumulate(part.size for part in parts)) if kind == "concatenation" else ()


class Axis:
    """A stretch of a strip, while it is still being found out what that is made of. `Axis(size)` is a new one
    that is nobody else's.

    Compare axes by `key`.
    """

    __slots__ = ("_key", "_leaves", "_parts", "_start", "_strip", "size")

    def __init__(self, size: int, strip: Strip | None = None, start: int = 0) -> None:
        self.size = size
        self._strip = Strip(size) if strip is None else strip
        self._start = start
        self._key: Key | None = None  # this and the next two: once it is settled
        self._parts: tuple[Axis, ...] | None = None
        self._leaves: tuple[Axis, ...] | None = None

    @property
    def key(self) -> Key:
        """What it is a stretch of, from where on, and its size: equal for axes that are one."""
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

    def shorten(self) -> None:
        """Go the way to the strips that it is made of, so that nobody need go it again: none of those on it
        is taken back."""
        pending: list[Axis] = [self]
        while pending:
            axis = pending.pop()
            way = [axis]  # ways that end in one strip share what lies before it
            while way[-1]._strip.kind == "same":
                way += way[-1]._strip.parts
            for each in reversed(way):
                # what was settled may be united with others since
                each._key = each._parts = each._leaves = None
                each._strip, each._start, _ = each.key
            pending += axis._strip.parts

    def settled(self) -> None:
        """What it is made of is known from now on: no strip becomes anything any more."""
        parts = self.parts if self.kind == "concatenation" else ()
        key = parts[0].key if len(parts) == 1 else self.key
        self._strip, self._start, _ = self._key = key

    @property
    def strip(self) -> Strip:
        """The strip that it is a stretch of."""
        return self.key[0]

    @property
    def start(self) -> int:
        """Its first index there."""
        return self.key[1]

    @property
    def stop(self) -> int:
        """The index there after its last."""
        return self.key[1] + self.size

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its strip."""
        return self.key[0].size == self.size

    @property
    def kind(self) -> Kind | None:
        """None: it has no parts."""
        kind = self.key[0].kind
        assert kind != "same"
        return kind

    @property
    def parts(self) -> tuple[Axis, ...]:
        """Of a product, outermost first; of a concatenation, in order. None of them is of the same kind."""
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
                part.settled()
            self._parts = tuple(found)
        return tuple(found)

    def _inside(self) -> list[Axis]:
        """Its parts as its strip has them, be they of its own kind."""
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
        """Some of its indices. `fits` says whether there is such an axis."""
        return self if stop - start == self.size else Axis(stop - start, self._strip, self._start + start)

    def leaves(self) -> Iterator[Axis]:
        """The axes without parts that it is made of, each as often as it occurs."""
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
        """How it is made up, with the strips by size; of a stretch also from where on."""
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
    """The axis of `parts`, outermost first; those of a strip of size 1 do not count."""
    return _made(
        "product",
        [part for part in parts if part.size != 1 or not part.is_whole],
        math.prod(part.size for part in parts),
    )


def concatenation(parts: Sequence[Axis]) -> Axis:
    """The axis of `parts` one after another; empty ones do not count."""
    return _made("concatenation", [part for part in parts if part.size], sum(part.size for part in parts))


def _made(kind: Kind, parts: Sequence[Axis], size: int) -> Axis:
    if len(parts) == 1:
        return parts[0]
    strip = Strip(size)
    if parts and size:
        strip.become(kind, parts)
        parts = Axis(size, strip).parts
    return parts[0] if len(parts) == 1 else Axis(size, strip)


def place_of(axis: Axis, offset: int) -> tuple[Strip, int] | None:
    """The strip without parts, and the place in it, in or beside which an axis is cut before its index
    `offset`. None: it cannot be cut there."""
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
    # one, where the parts of a concatenation were found to follow each other in a strip
    leaves = list(axis.leaves())
    return (leaves[0].strip, leaves[0].start) if offset == 0 else (leaves[-1].strip, leaves[-1].stop)


def fits(axis: Axis, start: int, stop: int) -> bool:
    """Whether some indices of an axis are an axis: of a product only whole rows are."""
    return place_of(axis, start) is not None and place_of(axis, stop) is not None


def _touch(one: Axis, other: Axis) -> bool:
    """Whether an axis is the stretch before another one of the same strip."""
    return one.kind is None and other.kind is None and one.strip is other.strip and one.stop == other.start
