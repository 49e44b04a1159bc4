"""The tensors of safetensors files, memory-mapped: what is not touched of them is not read.

    shard = MappedTensors([path]).tensor("head.weight")[:, :384].clone()

A mapped tensor is a private view of its file, which must not be truncated while the tensor lives. Checksums
are not compared: `Checkpoint` does that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshloom.checkpoint.tensor_file import DTYPES, TensorEntry
from meshloom.core.errors import CheckpointError

_NAMED_DTYPES = {text: dtype for dtype, text in DTYPES.items()}


class MappedTensors:
    """Those of `files`, each name in one of them. entries: of all tensors, by name.

    Raises `CheckpointError` if a file cannot be read.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        self.entries: dict[str, TensorEntry] = {}
        self._places: dict[str, tuple[Path, int]] = {}
        for path in files:
            for name, (entry, start) in _header_of(path).items():
                if name in self._places:
                    raise CheckpointError(f"{name} is in {self._places[name][0]} and in {path}.")
                self.entries[name] = entry
                self._places[name] = path, start

    def tensor(self, name: str) -> Tensor:
        """A tensor in full shape, on the CPU; writing to it does not change the file."""
        entry, (path, start) = self.entries[name], self._places[name]
        return map_bytes(path, start, entry.num_bytes).view(entry.dtype).view(entry.shape)


def map_bytes(path: Path, start: int, count: int, *, shared: bool = False) -> Tensor:
    """`count` bytes of a file from `start` on, as uint8; shared: writing changes the file."""
    if count == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        return torch.from_numpy(
            np.memmap(path, dtype=np.uint8, mode="r+" if shared else "c", offset=start, shape=(count,))
        )
    except ValueError as error:
        raise CheckpointError(f"{path} ends before byte {start + count}.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error


def _header_of(path: Path) -> Mapping[str, tuple[TensorEntry, int]]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= size - 8:
                raise ValueError("it does not end within the file")
            return _parsed(file.read(length), size)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no safetensors file, or it is truncated ({error}).") from error


def _parsed(text: bytes, file_bytes: int) -> dict[str, tuple[TensorEntry, int]]:
    """The tensors that a file of `file_bytes` bytes has by the JSON of its header, and the byte at which each
    starts. Raises `ValueError`, `KeyError`, `TypeError` or `AttributeError` if it cannot be."""
    header: dict[str, Any] = json.loads(text)
    first = 8 + len(text)
    found: dict[str, tuple[TensorEntry, int]] = {}
    for name, each in header.items():
        if name == "__metadata__":
            continue
        if each["dtype"] not in _NAMED_DTYPES:
            raise ValueError(f"{name} is of dtype {each['dtype']}, which is not supported")
        entry = TensorEntry(name, tuple(torch.Size(each["shape"])), _NAMED_DTYPES[each["dtype"]])
        start, stop = (first + offset for offset in each["data_offsets"])
        if stop - start != entry.num_bytes or not first <= start <= stop <= file_bytes:
            raise ValueError(f"{name} does not lie in the file")
        found[name] = entry, start
    return found
