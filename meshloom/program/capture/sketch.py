"""A count sketch: a tensor in a thirtieth of its memory, with estimates of the distance of two tensors.

A large tensor is split into `FOLDS` rows, which are added up with random signs for every element. The sum of
the difference of two tensors has its squared norm on average: every element counts once, and products of
different elements cancel. Equal tensors have equal sketches, bit by bit; sketches of the parts of a sum add
up to the sketch of the sum.

Source: Charikar, Chen, Farach-Colton, "Finding frequent items in data streams" (2002).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FOLDS = 32
SMALL = 4096  # elements; such tensors are kept in full
_CHUNK = 2**18  # elements that are processed together, to avoid a copy of the whole tensor


@dataclass(frozen=True)
class Sketch:
    """A sketch. Tensors of equal shapes have sketches that can be compared.

    folded: float64 [kept elements], of the finite elements (real and imaginary parts side by side); others
        are 0.
    odd: the same of codes for other elements (1 inf, 2 -inf, 3 NaN); None if all are finite.
    """

    shape: tuple[int, ...]
    folded: Tensor
    odd: Tensor | None

    def norm(self) -> float:
        """Norm of the tensor's finite elements, an estimate; exact for small tensors."""
        return float(self.folded.norm())

    def distance(self, other: Sketch) -> float:
        """Norm of the difference; infinite if shapes or the places of non-finite elements differ."""
        if self.shape != other.shape:
            return math.inf
        codes = [
            each.odd if each.odd is not None else torch.zeros_like(each.folded) for each in (self, other)
        ]
        if not torch.equal(*codes):
            return math.inf
        return float((self.folded - other.folded).norm())

    def __add__(self, other: Sketch) -> Sketch:
        odd = other.odd if self.odd is None else self.odd if other.odd is None else self.odd + other.odd
        return Sketch(self.shape, self.folded + other.folded, odd)


def sketch(tensor: Tensor) -> Sketch:
    """The sketch of a tensor of any shape and dtype, on its device."""
    flat = (tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()).contiguous()
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat.reshape(-1)
    rows = FOLDS if flat.numel() > SMALL else 1
    width = math.ceil(flat.numel() / rows)
    folded = torch.zeros(width, dtype=torch.float64, device=flat.device)
    odd: Tensor | None = None
    signs, shifts = _signs(rows, min(width, _CHUNK), tensor.device)
    # doubled, so that rolling is slicing
    twice = torch.cat([signs, signs]).to(flat.dtype if flat.is_floating_point() else torch.float64)
    for row in range(rows):
        part = flat[row * width : (row + 1) * width]
        for start in range(0, part.numel(), _CHUNK):
            values = part[start : start + _CHUNK]
            here = slice(start, start + values.numel())
            begin = -(shifts[row] + 7919 * (start // _CHUNK)) % len(signs)
            sign = twice[begin : begin + values.numel()]
            if not bool(torch.isfinite(values.sum(dtype=torch.float64))):
                odd = torch.zeros_like(folded) if odd is None else odd
                odd[here] += sign * _codes(values.double())
                values = values.nan_to_num(0.0, 0.0, 0.0)
            folded[here] += sign * values  # exact: signs change no digits
    return Sketch(tuple(tensor.shape), folded, odd)


def _signs(rows: int, width: int, device: torch.device) -> tuple[Tensor, list[int]]:
    """Signs [width], and by how much each row rolls them; the same in every call. A single row has none."""
    if rows == 1:
        return torch.ones(width, dtype=torch.float64, device=device), [0]
    generator = torch.Generator().manual_seed(0)
    shifts = torch.randint(width, (rows,), generator=generator).tolist()
    return (2.0 * torch.randint(2, (width,), generator=generator) - 1.0).to(device, torch.float64), shifts


def _codes(values: Tensor) -> Tensor:
    return (values == math.inf).double() + 2 * (values == -math.inf).double() + 3 * values.isnan().double()
