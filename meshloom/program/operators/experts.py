"""Operators on the rows that data routes to a rank's groups (experts): select, gather, scatter, compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshloom.program.operators.partial import grouped_product_of_part, zeros_of


def rows_here(value: Tensor, first: int, stop: int, num_groups: int, is_sorted: bool) -> Tensor:
    """Numbers [n] of the rows routed to the groups from `first` up to `stop`, of `num_groups`, in order.

    value: [s], each row's group; if rows are sorted: [groups], each group's end.
    """
    if is_sorted:
        start, end = (int(value[place - 1]) if place else 0 for place in (first, stop))
        return torch.arange(start, end, device=value.device)
    group = value.remainder(num_groups)  # groups may be negative, counted from the end
    return ((group >= first) & (group < stop)).nonzero().squeeze(1)


def take_rows(x: Tensor, rows: Tensor, dim: int) -> Tensor:
    """x [.., s, ..], rows [n] -> [.., n, ..]."""
    return x.index_select(dim, rows)


def place_rows(part: Tensor, rows: Tensor, dim: int, size: int) -> Tensor:
    """Rows scattered into a dim of `size`, zeros elsewhere: the ranks' results sum to the full tensor. part
    [.., n, ..], rows [n] -> [.., size, ..]."""
    return part.new_zeros((*part.shape[:dim], size, *part.shape[dim + 1 :])).index_copy(dim, rows, part)


def lookup_of_part(table: Tensor, index: Tensor, first: int, num_groups: int) -> Tensor:
    """Entries [n, *] by index [n], all of which lie in `table`, the part of a table from entry `first` on."""
    local: Any = index.remainder(num_groups) - first
    return torch.ops.aten.index.Tensor(table, [local])


def grouped_product_of_groups(
    product: Callable[..., Tensor], x: Tensor, w: Tensor, ends: Tensor, first: int
) -> Tensor:
    """`_grouped_mm` of some groups, from `first` on: their x [n, k], w [groups, k, n]; ends of all groups."""
    if not x.shape[0] or not w.shape[0]:
        return zeros_of(x, w, shape=(x.shape[0], w.shape[-1]))
    here = ends[first : first + w.shape[0]]
    here = here - ends[first - 1] if first else here
    return product(x, w, here) if "fallback" in str(product) else grouped_product_of_part(product, x, w, here)
