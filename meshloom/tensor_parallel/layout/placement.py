"""Where the parts of a value are along one mesh axis, and what that says about its gradient.

    value        gradient
    INVARIANT    invariant: every rank holds all of both
    Part(cut)    every rank holds some indices of it. The whole gradient is the sum of the ranks' gradients, each put where its indices
                 are: indices that one rank alone holds have their whole gradient there, those that several
                     hold have partial ones.
                 With an empty cut that is *replicated*; with a cut through one of the value's axes, *sharded*
    PARTIAL      the value is the sum over the ranks; every rank has the whole gradient

A cut says which indices of some axes each rank works on. It belongs to axes and not to tensors, so that every
value that has one of these axes, by itself, multiplied (heads x head size) or in a row (q | k | v), is cut by
it alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from meshloom.comm.pieces import Interval


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Which indices of some axes each rank works on.

    name: for people, like `heads of blocks.0`. parts: axis number -> an interval per rank.
    times: the axes are cut in blocks of their product, so that single indices of one of them are held by
        several ranks.
    """

    name: str
    parts: Mapping[int, tuple[Interval, ...]]
    times: bool = False

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True)
class Part:
    """Every rank holds the indices that `cut` gives it; None: every rank holds all of it."""

    cut: Cut | None

    def __str__(self) -> str:
        return f"part({self.cut.name})" if self.cut else "replicated"


@dataclass(frozen=True)
class Plain:
    """INVARIANT or PARTIAL."""

    kind: Literal["invariant", "partial"]

    def __str__(self) -> str:
        return self.kind


Placement = Part | Plain
INVARIANT = Plain("invariant")
PARTIAL = Plain("partial")
REPLICATED = Part(None)


def cut_of(placement: Placement) -> Cut | None:
    """That by which a value is divided; None: every rank holds all of it."""
    return placement.cut if isinstance(placement, Part) else None


def even_parts(size: int, num_parts: int) -> tuple[Interval, ...]:
    """Contiguous parts that differ by one at most, larger ones first.

    >>> even_parts(10, 4)
    ((0, 3), (3, 6), (6, 8), (8, 10))
    """
    small, larger = divmod(size, num_parts)
    stops = [small * part + min(part, larger) for part in range(num_parts + 1)]
    return tuple(itertools.pairwise(stops))


def shared_parts(outer: int, inner: int, num_parts: int) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
    """Parts of outer x inner where there are fewer outer ones than parts: ranks that share one divide its
    inner ones.

    >>> shared_parts(2, 5, 4)
    (((0, 1), (0, 1), (1, 2), (1, 2)), ((0, 3), (3, 5), (0, 3), (3, 5)))
    """
    outers: list[Interval] = []
    inners: list[Interval] = []
    for number, (start, stop) in enumerate(even_parts(num_parts, outer)):
        outers += [(number, number + 1)] * (stop - start)
        inners += even_parts(inner, stop - start)
    return tuple(outers), tuple(inners)
