"""The calls of the compiled engine, as its numbers and in words."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Op = Literal["sum", "avg", "product", "min", "max", "and", "or", "xor"]

Descriptor = tuple[int, int, int, int, int, tuple[int, ...]]  # kind, op, dtype, root, elements, shape

# In the order of ml_kind, ml_op and ml_dtype in native/engine.h.
KINDS = (
    "barrier",
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
)
BARRIER, ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, GATHER, SCATTER, ALL_TO_ALL = range(
    len(KINDS)
)
OPS: tuple[Op, ...] = ("sum", "avg", "product", "min", "max", "and", "or", "xor")
DTYPES = {
    dtype: number
    for number, dtype in enumerate((
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
        torch.complex64, torch.complex128,
    ))
}  # fmt: skip
# dtypes that are moved but not reduced, by the bytes of an element
_MOVED = {1: 15, 2: 16, 4: 17, 8: 18, 16: 19}
DONE, WAITING, MISMATCH, ABORTED, NO_SPACE, NO_MEMORY, OUTSIDE = range(7)


def dtype_number(tensor: Tensor) -> int:
    """The engine's number of a tensor's dtype, to move it."""
    number = DTYPES.get(tensor.dtype)
    return _MOVED[tensor.element_size()] if number is None else number


def describe(tensor: Tensor) -> str:
    """dtype and shape, like float32[2, 3]."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def call_of(descriptor: Descriptor | None) -> str:
    """A rank's call in words, like "all_reduce sum of float32[2, 3]"."""
    if descriptor is None:
        return "something else"
    kind, op, _, root, _, _ = descriptor
    name = KINDS[kind]
    if kind in (BARRIER, ALL_TO_ALL):
        return name
    reduced = f" {OPS[op]}" if kind in (ALL_REDUCE, REDUCE, REDUCE_SCATTER) else ""
    rooted = f" with root {root}" if kind in (REDUCE, BROADCAST, GATHER, SCATTER) else ""
    return f"{name}{reduced} of {tensor_of(descriptor)}{rooted}"


def tensor_of(descriptor: Descriptor | None) -> str:
    """The tensor of a rank's call in words, like "float32[2, 3]"."""
    if descriptor is None:
        return "something else"
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    number = descriptor[2]
    name = (
        names[number]
        if number < len(names)
        else f"elements of {next(size for size, moved in _MOVED.items() if moved == number)} bytes"
    )
    return f"{name}{list(descriptor[5])}"
