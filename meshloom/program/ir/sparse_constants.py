"""Properties of tensors that also work for sparse (COO) constants, by way of their indices and values.

A graph's adjacency matrix in `torch.sparse.mm(A, x)` is one. Operators may read them, not return them.
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
    """Whether it is a COO tensor. torch.export captures no other sparse layouts."""
    return tensor.layout == torch.sparse_coo


def dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Its indices and values; itself if it is dense."""
    return (tensor._indices(), tensor._values()) if is_sparse(tensor) else (tensor,)


def from_parts(parts: Sequence[Tensor], shape: Sequence[int], *, coalesced: bool) -> Tensor:
    """The sparse tensor of these indices and values."""
    return torch.sparse_coo_tensor(*parts, size=tuple(shape), is_coalesced=coalesced, check_invariants=False)


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """In elements; of a sparse tensor those of the dense tensor of its shape."""
    return contiguous_strides(tuple(tensor.shape)) if is_sparse(tensor) else tuple(tensor.stride())


def offset_of(tensor: Tensor) -> int:
    """Offset of the first element in its storage; 0 for a sparse tensor."""
    return 0 if is_sparse(tensor) else int(tensor.storage_offset())


def storage_of(tensor: Tensor) -> Any:
    """Storage of its values."""
    return dense_parts(tensor)[-1].untyped_storage()


def memory_of(tensor: Tensor) -> int:
    """Identity of that storage, equal for tensors that share it, also for those without values."""
    return storage_of(tensor)._cdata


def bits_of(part: Tensor) -> Tensor:
    """uint8 [bytes]: the elements of a dense tensor in order, on the CPU."""
    flat = part.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def empty_like(tensor: Tensor, device: torch.device | str) -> Tensor:
    """An uninitialized tensor of its shape, layout and number of values."""
    with _dispatch._disable_current_modes():  # reads parts of a real tensor inside a fake mode
        parts = [(each.shape, each.stride(), each.dtype) for each in dense_parts(tensor)]
        coalesced = is_sparse(tensor) and tensor.is_coalesced()
    empty = [torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in parts]
    return from_parts(empty, tensor.shape, coalesced=coalesced) if is_sparse(tensor) else empty[0]
