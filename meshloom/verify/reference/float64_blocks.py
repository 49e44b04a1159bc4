"""Tensors in float64, block by block: what is compared may fill the memory, so there is no room for a copy
of twice the width."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

BLOCK_ELEMENTS = 2**20
MAX_ELEMENTS = 4096  # of each tensor that is subsampled
Subsampled = Mapping[str, Tensor | None]


def float64_blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Flat float64 pieces of a dense or nested tensor, in order. Of complex numbers real and imaginary part are
    separate elements, as each of them may be infinite.

    >>> [block.tolist() for block in float64_blocks(torch.tensor([1 + 2j]))]
    [[1.0, 2.0]]
    """
    parts = tensor.detach()
    dense = torch.cat([part.reshape(-1) for part in parts.unbind()]) if tensor.is_nested else parts
    flat = (torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense).reshape(-1)
    for block in flat.split(BLOCK_ELEMENTS):
        yield block.double()


def norm(tensor: Tensor) -> float:
    """2-norm of the finite elements; of a sparse tensor, that of its values."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return math.sqrt(
        sum(float(torch.nan_to_num(block, 0.0, 0.0, 0.0).square().sum()) for block in float64_blocks(values))
    )


def distance(a: Tensor, b: Tensor) -> float:
    """||a - b|| of dense tensors of one shape; infinite if non-finite elements are not the same in both."""
    square = 0.0
    for here, there in zip(float64_blocks(a.to(b.device)), float64_blocks(b), strict=True):
        not_finite = ~(here.isfinite() & there.isfinite())
        if not bool(((here == there) | (here.isnan() & there.isnan()))[not_finite].all()):
            return math.inf
        square += float((here - there).masked_fill_(not_finite, 0.0).square_().sum())
    return math.sqrt(square)


def relative(difference: float, size: float) -> float:
    """A difference as a share of a size; infinite where either is not finite, or only the size is 0."""
    if difference == 0:
        return 0.0
    return difference / size if size and math.isfinite(difference) and math.isfinite(size) else math.inf


def gradient_distance(a: Tensor, b: Tensor) -> float:
    """||a - b||; infinite for sparse gradients with different rows, since SparseAdam updates those that were used, and for other shapes."""
    if a.is_sparse and b.is_sparse:
        a, b = a.coalesce(), b.coalesce()
        if not (a.shape == b.shape and torch.equal(a.indices().to(b.device), b.indices())):
            return math.inf
        a, b = a.values(), b.values()
    a, b = a.to_dense(), b.to_dense()
    return distance(a, b) if a.shape == b.shape else math.inf


def rerun_distance(there: Tensor, here: Tensor) -> float:
    """The same; 0 where it is infinite, which rounding cannot cause."""
    found = gradient_distance(there, here)
    return found if math.isfinite(found) else 0.0


def norm_of_all(gradients: Mapping[str, Tensor | None]) -> float:
    """2-norm of the whole gradient, in float64: in float32 it is off by 4e-4 for ten million elements."""
    elements = [
        each.coalesce().values() if each.is_sparse else each
        for each in gradients.values()
        if each is not None
    ]
    return math.sqrt(sum(float(block.square().sum()) for each in elements for block in float64_blocks(each)))


def subsample_each(gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """`subsample` of each gradient."""
    return {name: None if each is None else subsample(each) for name, each in gradients.items()}


def subsample(tensor: Tensor) -> Tensor:
    """At most `MAX_ELEMENTS` evenly spaced elements, flat, copied to the CPU as float64."""
    dense = tensor.to_dense()
    flat = torch.view_as_real(dense).reshape(-1) if dense.is_complex() else dense.reshape(-1)
    return flat[:: max(1, -(-flat.numel() // MAX_ELEMENTS))].detach().to("cpu", torch.float64, copy=True)


def ramp_of(tensor: Tensor) -> float:
    """The sum of all elements, with weights that rise from -1 to 1.

    >>> ramp_of(torch.tensor([1.0, 5.0, 2.0]))
    1.0
    """
    start, total = 0, 0.0
    blocks = list(float64_blocks(tensor))
    last = sum(map(len, blocks)) - 1
    for values in blocks:
        places = torch.arange(start, start + len(values), dtype=torch.float64, device=values.device)
        total += (2 * float(values @ places) / last - float(values.sum())) if last else 0.0
        start += len(values)
    return total
