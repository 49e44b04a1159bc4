"""The sum of sparse tensors over ranks: each gathers the indices and values of all, and adds them up."""

from __future__ import annotations

import torch
from torch import Tensor

from meshloom.comm.group import Group, Work


class SparseSum:
    """Replaces `tensor` (COO, the same shape on all ranks) by the sum of all ranks'."""

    def __init__(self, group: Group, tensor: Tensor) -> None:
        self._group, self._tensor = group, tensor
        self._counts: list[int] = []

    def start(self) -> list[Work]:
        """Gather the number of elements of each rank, then start gathering them."""
        n, mine = self._group.size, self._tensor.detach().cpu().coalesce()
        counts = torch.empty(n, dtype=torch.int64)
        self._group.all_gather(counts, torch.tensor([mine._nnz()])).wait()
        self._counts = counts.tolist()
        most = max(self._counts)
        indices = mine.indices().new_zeros(most, mine.sparse_dim())
        indices[: mine._nnz()] = mine.indices().T
        values = mine.values().new_zeros(most, *mine.values().shape[1:])
        values[: mine._nnz()] = mine.values()
        self._indices, self._values = indices.new_empty(n, *indices.shape), values.new_empty(n, *values.shape)
        return [
            self._group.all_gather(self._indices.view(-1), indices.view(-1)),
            self._group.all_gather(self._values.view(-1), values.view(-1)),
        ]

    def finish(self) -> None:
        indices = torch.cat([self._indices[rank, :count] for rank, count in enumerate(self._counts)])
        values = torch.cat([self._values[rank, :count] for rank, count in enumerate(self._counts)])
        total = torch.sparse_coo_tensor(indices.T, values, self._tensor.shape, check_invariants=False)
        with torch.no_grad():
            self._tensor.copy_(total.coalesce())  # not its `detach()`, which has indices of its own
