"""Writes safetensors files, and knows where in one each tensor lies before it is there.

    length of the header, 8 bytes | header, JSON: name -> dtype, shape, offsets | elements of the first, of
    the second, ...

The library is not used because it needs all tensors together, refuses those that share memory (tied ones, slices
of one bucket), and would require reading the file again for its checksum.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshloom.core.device.flat_bytes import flat_bytes
from meshloom.core.errors import CheckpointError

# What the format calls a dtype.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def why_not_held(name: str, dtype: torch.dtype) -> str:
    """Why a checkpoint cannot hold a tensor of this dtype, in a sentence; "" if it can."""
    if dtype in DTYPES:
        return ""
    return f"{name} is {dtype}, and a checkpoint holds only {', '.join(DTYPES.values())}. Give it one of these dtypes"


@dataclass(frozen=True)
class TensorEntry:
    """Name, dtype and shape of a tensor of a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(name: str, tensor: Any) -> TensorEntry:
        """Raises `CheckpointError` for anything but a tensor."""
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"{name} is of type {type(tensor).__name__}, and a checkpoint holds tensors only"
            )
        return TensorEntry(name, tuple(tensor.shape), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def widest_first(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """The entries with wider elements first, so that all are aligned."""
    return sorted(entries, key=lambda each: -each.dtype.itemsize)


def header_of(entries: Sequence[TensorEntry]) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file with these entries, in this order, and the byte at which each tensor starts.

    Raises `CheckpointError` for a dtype that the format lacks.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # as transformers writes it
    starts: dict[str, int] = {}
    position = 0
    for each in entries:
        if why := why_not_held(each.name, each.dtype):
            raise CheckpointError(why)
        header[each.name] = {
            "dtype": DTYPES[each.dtype],
            "shape": list(each.shape),
            "data_offsets": [position, position + each.num_bytes],
        }
        starts[each.name] = position
        position += each.num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    first = len(text).to_bytes(8, "little") + text
    return first, {name: len(first) + start for name, start in starts.items()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Writes a new file of tensors, to the disk; returns its size and checksum."""
    entries = widest_first(TensorEntry.of(name, tensor) for name, tensor in tensors.items())
    header, _ = header_of(entries)
    size, checksum = len(header), zlib.crc32(header)
    with path.open("xb") as file:
        file.write(header)
        for data in (tensor_bytes(tensors[each.name]) for each in entries):
            file.write(data)
            size, checksum = size + len(data), zlib.crc32(data, checksum)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "crc32": checksum}


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The elements in row-major order; little-endian, like all machines that torch runs on."""
    elements: Any = flat_bytes(tensor.detach().to("cpu")).numpy() if tensor.numel() else b""
    return memoryview(elements)
