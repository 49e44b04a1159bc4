"""Properties of tensors that also work for sparse (COO) constants, by way of their indices and values.

A graph's adjacency matrix in `torch.sparse.mm(A, x)` is one. Operators may read them, not return them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch

from meshloom.core.device.flat_bytes import flat_bytes
from meshloom.core.errors import TrainingError
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
    flat = part.detach().cpu()
    return flat_bytes(flat) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def empty_like(tensor: Tensor, device: torch.device | str) -> Tensor:
    """An uninitialized tensor of its shape, layout and number of values."""
    with _dispatch._disable_current_modes():  # reads parts of a real tensor inside a fake mode
        parts = [(each.shape, each.stride(), each.dtype) for each in dense_parts(tensor)]
        coalesced = is_sparse(tensor) and tensor.is_coalesced()
    empty = [torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in parts]
    return from_parts(empty, tensor.shape, coalesced=coalesced) if is_sparse(tensor) else empty[0]


def keep_as_constants(model: nn.Module) -> nn.Module:
    """Makes every sparse buffer a plain attribute of its module: a constant, which is neither saved nor exchanged, and
    which ranks make alike.

    >>> model = nn.Module()
    >>> model.register_buffer("edges", torch.eye(2).to_sparse())
    >>> list(keep_as_constants(model).buffers()), model.edges.layout
    ([], torch.sparse_coo)
    """
    for module in model.modules():
        buffers: dict[str, Tensor | None] = vars(module).get("_buffers", {})
        for name in [name for name, each in buffers.items() if each is not None and _has_no_strides(each)]:
            vars(module)[name] = buffers.pop(name)
            vars(module)["_non_persistent_buffers_set"].discard(name)
    return model


@dataclass(frozen=True, eq=False)
class SparseAttribute:
    """A sparse tensor that is an attribute of a module, as it was found. name: dotted, from the model."""

    name: str
    module: nn.Module
    tensor: Tensor
    version: int

    def digest(self) -> str:
        """Of its values; equal for equal bits."""
        dense = self.tensor.detach().to_sparse_coo()
        found = blake2b(f"{self.tensor.layout} {self.tensor.dtype} {list(self.tensor.shape)}".encode())
        for part in (dense._indices(), dense._values()):
            found.update(bits_of(part).numpy().data)
        return found.hexdigest()

    def check(self) -> None:
        """Raises `TrainingError` if it is another tensor now, or was written."""
        now = vars(self.module).get(self.name.rpartition(".")[2])
        if now is not self.tensor or self.tensor._version != self.version:
            raise TrainingError(
                f"{self.name} is a sparse matrix, which is a constant of the run, and a forward has changed it. "
                "Keep what changes in dense buffers (its values, say), of which the forward makes the matrix."
            )

    def move(self, device: torch.device) -> None:
        """To a device, in place of the tensor that is there."""
        vars(self.module)[self.name.rpartition(".")[2]] = self.tensor.to(device)


def sparse_attributes(model: nn.Module) -> Iterator[SparseAttribute]:
    """The sparse tensors that are attributes of the model's modules."""
    for prefix, module in model.named_modules():
        for name, each in vars(module).items():
            if isinstance(each, Tensor) and _has_no_strides(each):
                dotted = f"{prefix}.{name}" if prefix else name
                yield SparseAttribute(name=dotted, module=module, tensor=each, version=each._version)


def _has_no_strides(tensor: Tensor) -> bool:
    return tensor.layout != torch.strided
