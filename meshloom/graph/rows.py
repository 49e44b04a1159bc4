"""What a rank does with the rows that data sends to its groups: finds, takes and puts them back, and computes with its groups alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshloom.graph.operators import grouped_product_of_part, zeros_of


@dataclass(frozen=True, kw_only=True)
class RowsHere:
    """Which rows are sent to the groups from `first` up to `stop`, of `num_groups`: their numbers [n], in order."""

    first: int
    stop: int
    num_groups: int
    is_sorted: bool

    def __call__(self, value: Tensor) -> Tensor:
        """value: [s], each row's group; or [groups], where the rows of each end."""
        if self.is_sorted:
            start, stop = (int(value[place - 1]) if place else 0 for place in (self.first, max(self.stop, self.first)))
            return torch.arange(start, stop, device=value.device)
        group = value.remainder(self.num_groups)  # a group may be counted from the end
        return ((group >= self.first) & (group < self.stop)).nonzero().squeeze(1)


@dataclass(frozen=True)
class TakeRows:
    """Some rows of a dim."""

    dim: int

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [.., s, ..], rows [n] -> [.., n, ..]."""
        return x.index_select(self.dim, rows)


@dataclass(frozen=True)
class PlaceRows:
    """Rows in their places of a dim of `size`, zeros in the others: the ranks' results sum to the whole."""

    dim: int
    size: int

    def __call__(self, part: Tensor, rows: Tensor) -> Tensor:
        """part [.., n, ..], rows [n] -> [.., s, ..]."""
        shape = (*part.shape[: self.dim], self.size, *part.shape[self.dim + 1 :])
        return part.new_zeros(shape).index_copy(self.dim, rows, part)


def lookup_of_part(table: Tensor, index: Tensor, first: int, num_groups: int) -> Tensor:
    """Entries [n, *] of a table, of which this is the part from entry `first` on, by index [n]: all of them lie in it."""
    local: Any = index.remainder(num_groups) - first
    return torch.ops.aten.index.Tensor(table, [local])


def grouped_product_of_groups(product: Callable[..., Tensor], x: Tensor, w: Tensor, ends: Tensor, first: int) -> Tensor:
    """`_grouped_mm` of the rows of some groups: x [n, k], theirs alone; w [part of groups, k, n], from group `first` on; ends [groups]: of all rows."""
    if not x.shape[0] or not w.shape[0]:
        return zeros_of(x, w, shape=(x.shape[0], w.shape[-1]))
    here = ends[first : first + w.shape[0]]
    here = here - ends[first - 1] if first else here
    return product(x, w, here) if "fallback" in str(product) else grouped_product_of_part(product, x, w, here)
