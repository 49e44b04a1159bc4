"""Placements of a value along the tp axis, which also determine the placement of its gradient.

    value        gradient
    INVARIANT    invariant: every rank holds all of value and gradient
    Part(cut)    every rank holds some indices. The full gradient is the sum of the ranks' gradients, each put at its indices:
                 indices that one rank holds have their full gradient there, those that several hold have
                 partial ones. Without a cut it is *replicated*; with a cut through one of the value's axes,
                 *sharded*
    PARTIAL      the value is the sum over the ranks; every rank holds the full gradient

A cut says which indices of some axes each rank holds. It belongs to axes, not to tensors: every value that
has one of these axes, alone, in a product (heads x head size) or in a concatenation (q | k | v), is sharded
accordingly.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from meshloom.comm.pieces import Interval


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Which indices of some axes each rank holds.

    name: for messages, like `heads of blocks.0`. parts: axis number -> an interval per rank.
    is_product: the axes are sharded in blocks of their product, so that several ranks hold the same indices
        of one of them.
    """

    name: str
    parts: Mapping[int, tuple[Interval, ...]]
    is_product: bool = False

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True)
class Part:
    """Every rank holds the indices that `cut` assigns to it; None: every rank holds all of them."""

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
    """The cut of a placement; None: every rank holds the full value."""
    return placement.cut if isinstance(placement, Part) else None


def even_parts(size: int, num_parts: int) -> tuple[Interval, ...]:
    """Contiguous parts whose sizes differ by at most one, larger ones first.

    >>> even_parts(10, 4)
    ((0, 3), (3, 6), (6, 8), (8, 10))
    """
    small, larger = divmod(size, num_parts)
    stops = [small * part + min(part, larger) for part in range(num_parts + 1)]
    return tuple(itertools.pairwise(stops))


def shared_parts(outer: int, inner: int, num_parts: int) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
    """Parts of outer x inner if outer has fewer indices than there are parts: ranks that share one divide its
    inner indices.

    >>> shared_parts(2, 5, 4)
    (((0, 1), (0, 1), (1, 2), (1, 2)), ((0, 3), (3, 5), (0, 3), (3, 5)))
    """
    outers: list[Interval] = []
    inners: list[Interval] = []
    for number, (start, stop) in enumerate(even_parts(num_parts, outer)):
        outers += [(number, number + 1)] * (stop - start)
        inners += even_parts(inner, stop - start)
    return tuple(outers), tuple(inners)
