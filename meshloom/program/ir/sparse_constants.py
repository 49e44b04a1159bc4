"""Constants of a program that are sparse matrices (COO): what is asked of any tensor, answered by their
indices and values.

A graph's adjacency matrix in `torch.sparse.mm(A, x)` is one. Operators may read them; what an operator gives
is dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch

from meshloom.program.ir.nodes import contiguous_strides

_dispatch: Any = _python_dispatch


def is_sparse(tensor: Tensor) -> bool:
    """Whether it is a COO tensor. Other sparse layouts have no strides and no program: torch.export reads
    none."""
    return tensor.layout == torch.sparse_coo


def dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Its indices and values, as they lie there; itself if it is dense."""
    return (tensor._indices(), tensor._values()) if is_sparse(tensor) else (tensor,)


def from_parts(parts: Sequence[Tensor], shape: Sequence[int], *, coalesced: bool) -> Tensor:
    """The sparse tensor of these indices and values."""
    return torch.sparse_coo_tensor(*parts, size=tuple(shape), is_coalesced=coalesced, check_invariants=False)


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """In elements; of a sparse tensor those that it would have."""
    return contiguous_strides(tuple(tensor.shape)) if is_sparse(tensor) else tuple(tensor.stride())


def offset_of(tensor: Tensor) -> int:
    """Elements before its first one in its memory; none for a sparse tensor."""
    return 0 if is_sparse(tensor) else int(tensor.storage_offset())


def storage_of(tensor: Tensor) -> Any:
    """The memory of its values."""
    return dense_parts(tensor)[-1].untyped_storage()


def memory_of(tensor: Tensor) -> int:
    """A number for that memory: tensors that share it have the same, also those without values."""
    return storage_of(tensor)._cdata


def empty_like(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Another one of its shape, layout and number of values, without them."""
    with _dispatch._disable_current_modes():  # a real one is asked for its parts where fake ones are made
        parts = [(each.shape, each.stride(), each.dtype) for each in dense_parts(tensor)]
        coalesced = is_sparse(tensor) and tensor.is_coalesced()
    made = [torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in parts]
    return from_parts(made, tensor.shape, coalesced=coalesced) if is_sparse(tensor) else made[0]
