"""Embedding bags where each rank has some rows of the table; other rows contribute zero to its sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshloom.program.operators.partial import zeros_of

SUM, MEAN = 0, 1  # modes, as ATen counts them


@dataclass(frozen=True, kw_only=True)
class BagsOfPart:
    """`embedding_bag` of the rows from `start` on, of `num_rows`: the ranks' results sum to the bags.

    mode: SUM or MEAN. padding: the row that does not count, -1 for none. has_last: whether offsets end with
        the number of entries.
    first: whether this is the first rank, which alone returns the other results. shapes: of those.
    """

    start: int
    num_rows: int
    mode: int
    padding: int
    has_last: bool
    first: bool
    shapes: tuple[tuple[int, ...], ...]

    def __call__(
        self, weight: Tensor, index: Tensor, offsets: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """weight [some rows, d], index [entries], offsets [bags], weights [entries] or none -> bags [bags,
        d], and three tensors of integers."""
        others = self._other_results(weight, index, offsets, weights)
        return self._bags(weight, index, offsets, weights), *others

    def __str__(self) -> str:
        return f"embedding_bag of rows from {self.start} of {self.num_rows}"

    def _bags(self, weight: Tensor, index: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        if not weight.shape[0]:
            given = (weight,) if weights is None else (weight, weights)
            return zeros_of(*given, shape=(len(offsets) - self.has_last, weight.shape[1]))
        counted = index != self.padding
        here = (index >= self.start) & (index < self.start + weight.shape[0]) & counted
        of_entries: Any = {"dtype": weight.dtype, "device": index.device}
        shares = torch.ones(len(index), **of_entries) if weights is None else weights
        if self.mode == MEAN:
            entries = torch.arange(len(index), device=index.device, dtype=offsets.dtype)
            bag = torch.searchsorted(offsets, entries, right=True) - 1
            sizes = torch.zeros(len(offsets), **of_entries).index_add(0, bag, counted.to(weight.dtype))
            shares = shares / sizes[bag]
        local = torch.where(here, index - self.start, 0)
        return torch.ops.aten.embedding_bag.default(
            weight, local, offsets, False, SUM, False, torch.where(here, shares, 0.0), self.has_last
        )[0]  # fmt: skip

    def _other_results(
        self, weight: Tensor, index: Tensor, offsets: Tensor, weights: Tensor | None
    ) -> Sequence[Tensor]:
        """The other results of the unsharded operator, which do not depend on the rows' values."""
        if not self.first:
            return [index.new_zeros(shape) for shape in self.shapes]
        # one column suffices
        narrow = weight.new_zeros(self.num_rows, 1).requires_grad_(weight.requires_grad)
        shares = None if weights is None else weights.detach()
        padding = self.padding if self.padding >= 0 else None
        return torch.ops.aten.embedding_bag.padding_idx(
            narrow, index, offsets, False, self.mode, False, shares, self.has_last, padding
        )[1:]  # fmt: skip
